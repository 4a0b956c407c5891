"""An encoder with a masked-LM head as a list of layers: the common part of BERT and RoBERTa."""

from __future__ import annotations

from typing import Protocol

from ctxlm_ds.models.build import ModelBuild
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.embeddings import VocabularyBias, WordTable, input_embeddings
from ctxlm_ds.models.parts.heads import EncoderHeads
from ctxlm_ds.models.parts.transformer import TransformerShape, block_settings, final_layer_norm, transformer_blocks


class EncoderSection(TransformerShape, Protocol):
    """Settings of an encoder."""

    pre_layer_norm: bool


def encoder_layers(
    model: EncoderSection, build: ModelBuild, token_types: int = 0, position_offset: int = 0, sentence_classes: int = 0
) -> list[LayerDescription]:
    """List the layers that write predicted_logits [b, p, v] and, with classes, sentence_logits [b, m, classes].

    Args:
        model: the recipe's section.
        build: kernels, this rank's share, and what the objective needs.
        token_types: rows of the token-type table; 0 for no table.
        position_offset: row of the position table that holds position 0.
        sentence_classes: classes of a pooler and classifier over each sequence's first position; 0 for no classifier.
    """
    assert model.vocab_size is not None
    settings = block_settings(model, build, model.pre_layer_norm)
    table = WordTable(model.vocab_size, model.hidden_size, settings.init, build)
    heads = {
        "width": model.hidden_size, "eps": model.layer_norm_eps, "activation": model.hidden_activation,
        "init": settings.init, "build": build, "num_classes": sentence_classes,
    }  # fmt: skip
    cls, classes = (("cls_positions",), ("sentence_logits",)) if sentence_classes else ((), ())
    reads = ("hidden", "sequence_ids", "prediction_positions", *cls)
    bias = {"vocab_size": model.vocab_size, "parallel": build.parallel}
    return [
        table.look_up(),
        input_embeddings(model, build, position_offset=position_offset, num_token_types=token_types, layer_norm=True),
        *transformer_blocks("encoder", model.num_layers, settings, build),
        *final_layer_norm(settings, build),
        LayerDescription("heads", EncoderHeads, reads, ("predicted_hidden", *classes), heads),
        table.decode("predicted_hidden", "predicted_scores"),
        LayerDescription("mlm_bias", VocabularyBias, ("predicted_scores",), ("predicted_logits",), bias),
    ]
