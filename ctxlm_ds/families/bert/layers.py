"""BERT (Devlin 2018), Megatron-LM's BERT, UniLM (Dong 2019) and TinyBERT (Jiao 2020) as lists of layers."""

from __future__ import annotations

from ctxlm_ds.families.bert.config import (
    CLASSES,
    PROJECTED,
    BertSection,
    MegatronBertSection,
    TinyBertSection,
    UnilmSection,
)
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.comparison import projection
from ctxlm_ds.models.parts.encoder import SENTENCE_CLASSES, encoder_layers, encoder_trunk
from ctxlm_ds.models.parts.heads import SequenceClassifier
from ctxlm_ds.models.parts.transformer import initial_weights
from ctxlm_ds.models.spec import ModelBuild


def bert_layers(model: BertSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers: embeddings with token types, blocks, the masked-LM head, and the pooler if it is needed."""
    classes = SENTENCE_CLASSES if "sentence_logits" in build.outputs else 0
    return encoder_layers(model, build, token_types=model.type_vocab_size, sentence_classes=classes)


def megatron_bert_layers(model: MegatronBertSection, build: ModelBuild) -> list[LayerDescription]:
    """List BERT's layers with embeddings that have no LayerNorm."""
    classes = SENTENCE_CLASSES if "sentence_logits" in build.outputs else 0
    return encoder_layers(
        model, build, token_types=model.type_vocab_size, sentence_classes=classes, embedding_norm=False
    )


def unilm_layers(model: UnilmSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers: those of BERT, whose attention reads the ranks of the positions."""
    classes = SENTENCE_CLASSES if "sentence_logits" in build.outputs else 0
    return encoder_layers(model, build, token_types=model.type_vocab_size, sentence_classes=classes, ranked=True)


def tinybert_layers(model: TinyBertSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers: embeddings with token types, blocks, BERT's masked-LM head; or projection and classifier."""
    if "predicted_logits" in build.outputs:
        return bert_layers(model, build)
    layers = encoder_trunk(model, build, token_types=model.type_vocab_size)
    if PROJECTED in build.outputs:
        layers.append(projection(model.hidden_size, model.fit_size, initial_weights(model), build))
    if CLASSES in build.outputs:
        head = {
            "width": model.hidden_size, "num_classes": model.num_classes, "init": initial_weights(model),
            "build": build,
        }  # fmt: skip
        reads = ("hidden", "sequence_ids", "cls_positions")
        layers.append(LayerDescription("classifier_head", SequenceClassifier, reads, (CLASSES,), head))
    return layers
