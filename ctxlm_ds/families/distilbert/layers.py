"""DistilBERT (Sanh 2019) as a list of layers."""

from __future__ import annotations

from ctxlm_ds.families.distilbert.config import DistilbertSection
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.encoder import encoder_layers
from ctxlm_ds.models.spec import ModelBuild


def distilbert_layers(model: DistilbertSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers: embeddings without token types, blocks, the masked-LM head."""
    return encoder_layers(model, build)
