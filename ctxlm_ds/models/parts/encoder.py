"""An encoder with a masked-LM head as a list of layers: the common part of BERT and RoBERTa."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.embeddings import VocabularyBias, WordTable, input_embeddings
from ctxlm_ds.models.parts.heads import EncoderHeads, SpanBoundaryHead
from ctxlm_ds.models.parts.transformer import (
    BlockSettings,
    TransformerShape,
    block_settings,
    final_layer_norm,
    initial_weights,
    transformer_blocks,
)
from ctxlm_ds.models.spec import ModelBuild
from ctxlm_ds.parallel.layers import TokenLinear

SENTENCE_CLASSES = 2
"""Classes of a pair of segments."""


class EncoderSection(TransformerShape, Protocol):
    """Settings of an encoder."""

    pre_layer_norm: bool

    @property
    def num_blocks(self) -> int: ...


def encoder_layers(
    model: EncoderSection,
    build: ModelBuild,
    token_types: int = 0,
    position_offset: int = 0,
    sentence_classes: int = 0,
    embedding_size: int | None = None,
    embedding_norm: bool = True,
    ranked: bool = False,
) -> list[LayerDescription]:
    """List the layers that write predicted_logits [b, p, v] and, with classes, sentence_logits [b, m, classes].

    They write boundary_logits [b, p, v] if the objective needs them, and `ranked` ranked_logits instead of
    predicted_logits.

    Args:
        model: the recipe's section.
        build: kernels, this rank's share, and what the objective needs.
        token_types: rows of the token-type table; 0 for no table.
        position_offset: row of the position table that holds position 0.
        sentence_classes: classes of a pooler and classifier over each sequence's first position; 0 for no classifier.
        embedding_size: width of the tables; None for the width of the blocks. A matrix maps one to the other.
        embedding_norm: LayerNorm after the embeddings.
        ranked: positions see none of a higher rank (a field `ranks` [b, s]).
    """
    settings = block_settings(model, build, model.pre_layer_norm)
    width = embedding_size or model.hidden_size
    table = word_table(model, build, width)
    heads = {
        "width": model.hidden_size, "eps": model.layer_norm_eps, "activation": model.hidden_activation,
        "init": settings.init, "build": build, "predicted_width": width, "num_classes": sentence_classes,
    }  # fmt: skip
    cls, classes = (("cls_positions",), ("sentence_logits",)) if sentence_classes else ((), ())
    reads = ("hidden", "sequence_ids", "prediction_positions", *cls)
    bias = {"vocab_size": model.vocab_size, "parallel": build.parallel}
    logits = "ranked_logits" if ranked else "predicted_logits"
    layers = [
        *encoder_trunk(model, build, token_types, position_offset, embedding_size, embedding_norm, ranked),
        LayerDescription("heads", EncoderHeads, reads, ("predicted_hidden", *classes), heads),
        table.decode("predicted_hidden", "predicted_scores"),
        LayerDescription("mlm_bias", VocabularyBias, ("predicted_scores",), (logits,), bias),
    ]
    return layers + (boundary_layers(model, build, settings, table) if "boundary_logits" in build.outputs else [])


def encoder_trunk(
    model: EncoderSection,
    build: ModelBuild,
    token_types: int = 0,
    position_offset: int = 0,
    embedding_size: int | None = None,
    embedding_norm: bool = True,
    ranked: bool = False,
) -> list[LayerDescription]:
    """List the layers of an encoder without heads; the arguments are those of encoder_layers."""
    settings = block_settings(model, build, model.pre_layer_norm)
    settings = replace(settings, attention=replace(settings.attention, ranked=ranked))
    width = embedding_size or model.hidden_size
    return [
        word_table(model, build, width).look_up(),
        input_embeddings(
            model,
            build,
            position_offset=position_offset,
            num_token_types=token_types,
            layer_norm=embedding_norm,
            width=width,
        ),  # fmt: skip
        *([] if embedding_size is None else [project_embeddings(width, settings, build)]),
        *transformer_blocks("encoder", model.num_blocks, settings, build),
        *final_layer_norm(settings, build),
    ]


def word_table(model: EncoderSection, build: ModelBuild, width: int) -> WordTable:
    """Describe an encoder's word table, `width` wide."""
    assert model.vocab_size is not None
    return WordTable(model.vocab_size, width, initial_weights(model), build)


def project_embeddings(width: int, settings: BlockSettings, build: ModelBuild) -> LayerDescription:
    """Describe the layer that maps embeddings [..., width] to the width of the blocks (Lan 2020, section 3.1)."""
    kwargs = {
        "in_features": width, "out_features": settings.hidden_size, "init": settings.init, "kernels": build.kernels,
        "parallel": build.parallel,
    }  # fmt: skip
    return LayerDescription("embedding_projection", TokenLinear, ("hidden",), ("hidden",), kwargs)


def boundary_layers(
    model: EncoderSection, build: ModelBuild, settings: BlockSettings, table: WordTable
) -> list[LayerDescription]:
    """List the layers that write boundary_logits [b, p, v], the words of spans predicted from their boundaries."""
    head = {
        "width": model.hidden_size, "eps": model.layer_norm_eps, "activation": model.hidden_activation,
        "init": settings.init, "build": build, "predicted_width": table.width,
    }  # fmt: skip
    reads = ("hidden", "sequence_ids", "boundary_positions", "boundary_offsets")
    bias = {"vocab_size": model.vocab_size, "parallel": build.parallel, "optional": True}
    return [
        LayerDescription("boundary_head", SpanBoundaryHead, reads, ("boundary_hidden",), head),
        table.decode("boundary_hidden", "boundary_scores"),
        LayerDescription("boundary_bias", VocabularyBias, ("boundary_scores",), ("boundary_logits",), bias),
    ]
