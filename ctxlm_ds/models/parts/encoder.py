"""An encoder with a masked-LM head as a list of layers: what BERT and RoBERTa share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ctxlm_ds.kernels.attention import AttentionSpec
from ctxlm_ds.models.build import ModelBuild
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.embeddings import EmbeddingSettings, EncoderEmbeddings, VocabularyBias, WordTable
from ctxlm_ds.models.parts.heads import EncoderHeads
from ctxlm_ds.models.parts.transformer import BlockSettings, final_layer_norm, transformer_blocks
from ctxlm_ds.parallel.parameters import Normal


class EncoderSection(Protocol):
    """The settings that the list needs."""

    vocab_size: int | None
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    hidden_activation: Any
    layer_norm_eps: float
    hidden_dropout: float
    attention_dropout: float
    initializer_range: float
    pre_layer_norm: bool


@dataclass(frozen=True)
class EncoderShape:
    """What tells one encoder from another."""

    token_types: int = 0
    """Rows of the token-type table; 0 for none."""
    position_offset: int = 0
    """Row of the position table that holds position 0."""
    sentence_classes: int = 0
    """Classes of a pooler and classifier over each sequence's first position; 0 for none."""


def encoder_layers(model: EncoderSection, shape: EncoderShape, build: ModelBuild) -> list[LayerDescription]:
    """List the layers that write predicted_logits [b, p, v] and, with classes, sentence_logits [b, m, classes]."""
    assert model.vocab_size is not None
    width, eps, init = model.hidden_size, model.layer_norm_eps, Normal(model.initializer_range)
    table = WordTable(model.vocab_size, width, init, build)
    settings = BlockSettings(
        hidden_size=width,
        num_heads=model.num_attention_heads,
        intermediate_size=model.intermediate_size,
        activation=model.hidden_activation,
        norm_eps=eps,
        hidden_dropout=model.hidden_dropout,
        attention=AttentionSpec(
            head_size=width // model.num_attention_heads, dropout=model.attention_dropout, shares_rows=build.shares_rows
        ),
        pre_layer_norm=model.pre_layer_norm,
        init=init,
        residual_init=init,
    )
    embedding_settings = EmbeddingSettings(
        num_positions=model.max_position_embeddings,
        width=width,
        norm_eps=eps,
        dropout=model.hidden_dropout,
        init=init,
        position_offset=shape.position_offset,
        num_token_types=shape.token_types,
    )
    embeddings = {"settings": embedding_settings, "kernels": build.kernels, "parallel": build.parallel}
    heads = {
        "width": width, "eps": eps, "activation": model.hidden_activation, "num_classes": shape.sentence_classes,
        "init": init, "kernels": build.kernels, "parallel": build.parallel,
    }  # fmt: skip
    types = ("token_type_ids",) if shape.token_types else ()
    places, classes = (("cls_positions",), ("sentence_logits",)) if shape.sentence_classes else ((), ())
    bias = {"vocab_size": model.vocab_size, "parallel": build.parallel}
    return [
        table.look_up(),
        LayerDescription("embeddings", EncoderEmbeddings, ("hidden", "position_ids", *types), ("hidden",), embeddings),
        *transformer_blocks("encoder", model.num_layers, settings, build),
        *([final_layer_norm(width, eps, build)] if model.pre_layer_norm else []),
        LayerDescription(
            "heads",
            EncoderHeads,
            ("hidden", "sequence_ids", "prediction_positions", *places),
            ("predicted_hidden", *classes),
            heads,
        ),  # fmt: skip
        table.decode("predicted_hidden", "predicted_scores"),
        LayerDescription("mlm_bias", VocabularyBias, ("predicted_scores",), ("predicted_logits",), bias),
    ]
