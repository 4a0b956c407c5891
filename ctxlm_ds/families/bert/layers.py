"""BERT (Devlin 2018) as a list of layers."""

from __future__ import annotations

from ctxlm_ds.families.bert.config import BertSection
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.encoder import SENTENCE_CLASSES, encoder_layers
from ctxlm_ds.models.spec import ModelBuild


def bert_layers(model: BertSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers: embeddings with token types, blocks, the masked-LM head, and the pooler if it is needed."""
    classes = SENTENCE_CLASSES if "sentence_logits" in build.outputs else 0
    return encoder_layers(model, build, token_types=model.type_vocab_size, sentence_classes=classes)
