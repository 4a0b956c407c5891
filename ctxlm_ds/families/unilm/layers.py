"""UniLM (Dong 2019) as a list of layers."""

from __future__ import annotations

from ctxlm_ds.families.unilm.config import UnilmSection
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.encoder import SENTENCE_CLASSES, encoder_layers
from ctxlm_ds.models.spec import ModelBuild


def unilm_layers(model: UnilmSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers: those of BERT, whose attention reads the ranks of the positions."""
    classes = SENTENCE_CLASSES if "sentence_logits" in build.outputs else 0
    return encoder_layers(model, build, token_types=model.type_vocab_size, sentence_classes=classes, ranked=True)
