"""Megatron-LM's BERT as a list of layers."""

from __future__ import annotations

from ctxlm_ds.families.megatron_bert.config import MegatronBertSection
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.encoder import SENTENCE_CLASSES, encoder_layers
from ctxlm_ds.models.spec import ModelBuild


def megatron_bert_layers(model: MegatronBertSection, build: ModelBuild) -> list[LayerDescription]:
    """List BERT's layers with embeddings that have no LayerNorm."""
    classes = SENTENCE_CLASSES if "sentence_logits" in build.outputs else 0
    return encoder_layers(
        model, build, token_types=model.type_vocab_size, sentence_classes=classes, embedding_norm=False
    )
