"""T5's settings (Raffel 2020, arXiv:1910.10683; version 1.1: google-research/text-to-text-transfer-transformer)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from ctxlm_ds.families.base import Family, HeadsSection, dropout_problems, tiny_transformer
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import PositiveFloat, PositiveFraction, Probability, SmallInt, Width


class T5Section(HeadsSection):
    """T5: an encoder and a decoder with relative positions, RMSNorm and no biases."""

    learned_positions: ClassVar[bool] = False
    inner_dropout: ClassVar[str | None] = "hidden_dropout"
    same_function: ClassVar[tuple[str, ...]] = (
        "family", "num_attention_heads", "hidden_activation", "gated", "tied_head", "relative_buckets",
        "relative_reach", "layer_norm_eps",
    )  # fmt: skip

    family: str = "t5"
    hidden_size: Width = 512
    """Width of the residual stream (d_model)."""
    num_layers: SmallInt = 6
    """Number of layers of the encoder."""
    num_decoder_layers: SmallInt = 6
    """Number of layers of the decoder, as many as of the encoder as published."""
    num_attention_heads: SmallInt = 8
    """Attention heads."""
    head_size: Width = 64
    """Width of a head (d_kv); num_attention_heads x head_size need not be hidden_size."""
    intermediate_size: Width = 2048
    """Width of the feed-forward layer (d_ff), after the gate if it has one."""
    hidden_activation: Literal["gelu", "gelu_tanh", "relu"] = "relu"
    """Activation of the feed-forward layer (T5 relu, 1.1 gelu_tanh)."""
    gated: bool = False
    """The activation of one half of the feed-forward layer is a factor of the other half (1.1)."""
    tied_head: bool = True
    """The head is the word table times hidden_size^-0.5; false: a separate table (1.1)."""
    relative_buckets: SmallInt = 32
    """Learnt biases of each head, by distance; the encoder's are half before, half after a position."""
    relative_reach: Width = 128
    """Distance from which all positions share a bias."""
    layer_norm_eps: PositiveFraction = 1e-6
    """Epsilon of every RMSNorm."""
    hidden_dropout: Probability = 0.1
    """Dropout on embeddings, inside feed-forward layers, on the output of each layer's parts and of each stack."""
    attention_dropout: Probability = 0.1
    """Dropout on attention probabilities."""
    initializer_factor: PositiveFloat = 1.0
    """Factor of the published deviations of all initial weights."""

    @property
    def num_blocks(self) -> int:
        return self.num_layers + self.num_decoder_layers

    def problems(self) -> Iterator[Problem]:
        yield from dropout_problems(self)
        least = 4
        if self.relative_buckets < least or self.relative_buckets % least:
            text = (
                f"{self.relative_buckets}: halves of the buckets are of one direction, and halves of these of one "
                f"distance each; set a multiple of {least} (32 as published)"
            )
            yield Problem("model.relative_buckets", text)
        elif self.relative_reach <= self.relative_buckets // 2:
            text = (
                f"{self.relative_reach} is not beyond the {self.relative_buckets // 2} distances that have a separate "
                "bias; raise it, or lower model.relative_buckets"
            )
            yield Problem("model.relative_reach", text, ("model.relative_buckets",))


T5 = Family(
    name="t5",
    title="T5 (Raffel 2020)",
    section=T5Section,
    layers="ctxlm_ds.families.t5.layers:t5_layers",
    export="ctxlm_ds.families.t5.export:EXPORT",
    outputs=frozenset({"decoder_logits"}),
    objective="span_corruption",
    sample_format="chunks",
    tokenizer="t5",
    tiny=lambda: tiny_transformer(
        "t5", "span_corruption", "chunks", num_layers=2, num_decoder_layers=2, head_size=6, intermediate_size=48,
        max_position_embeddings=None, relative_buckets=8, relative_reach=12,
    ),
    vocab_size=32_128,
)  # fmt: skip
