"""RoBERTa (Liu 2019) as a list of layers."""

from __future__ import annotations

from ctxlm_ds.families.roberta.config import POSITION_OFFSET, RobertaSection
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.encoder import encoder_layers
from ctxlm_ds.models.spec import ModelBuild


def roberta_layers(model: RobertaSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers: embeddings without token types, whose positions begin at 2, blocks, the masked-LM head."""
    return encoder_layers(model, build, position_offset=POSITION_OFFSET)
