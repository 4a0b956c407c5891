"""Settings of BART (Lewis 2019, arXiv:1910.13461) and mBART (Liu 2020, arXiv:2001.08210), as in fairseq."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from ctxlm_ds.families.base import Family, TransformerSection, tiny_transformer
from ctxlm_ds.recipe.sections import PositiveFraction, Probability, SmallInt, Width

POSITION_OFFSET = 2
"""Rows of each position table before position 0; they are never used."""


class BartSection(TransformerSection):
    """BART: an encoder and a decoder with learnt positions, whose norms follow each block."""

    pre_layer_norm: ClassVar[bool] = False
    inner_dropout: ClassVar[str | None] = "activation_dropout"
    same_function: ClassVar[tuple[str, ...]] = (*TransformerSection.same_function, "scale_embedding")

    family: str = "bart"
    num_layers: SmallInt = 6
    """Number of layers of the encoder."""
    num_decoder_layers: SmallInt = 6
    """Number of layers of the decoder, as many as of the encoder as published."""
    max_position_embeddings: Width = 1024
    """Longest input and longest target (the two unused rows of each table are added by the model)."""
    layer_norm_eps: PositiveFraction = 1e-5
    """Epsilon of every LayerNorm, 1e-5 as published."""
    activation_dropout: Probability = 0.1
    """Dropout between the two matrices of feed-forward layers."""
    scale_embedding: bool = False
    """Word vectors are multiplied by the root of hidden_size before positions are added (mBART)."""

    @property
    def num_blocks(self) -> int:
        return self.num_layers + self.num_decoder_layers


def tiny_bart(family: str, **objective: Any) -> dict[str, Any]:
    """Return the sections of a recipe small enough for tests; `objective` are further settings."""
    shape = {"num_layers": 2, "num_decoder_layers": 2, "intermediate_size": 48}
    tiny = tiny_transformer(family, "text_infilling", "doc_sentences", **shape)
    return tiny | {"objective": tiny["objective"] | objective}


BART = Family(
    name="bart",
    title="BART (Lewis 2019)",
    section=BartSection,
    layers="ctxlm_ds.families.bart.layers:bart_layers",
    export="ctxlm_ds.families.bart.export:EXPORT",
    outputs=frozenset({"decoder_logits"}),
    objective="text_infilling",
    sample_format="doc_sentences",
    tokenizer="bpe",
    tiny=lambda: tiny_bart("bart"),
    vocab_size=50_265,
)


class MBartSection(BartSection):
    """mBART: BART with norms before each block and after each stack, and scaled word vectors."""

    pre_layer_norm: ClassVar[bool] = True

    family: str = "mbart"
    hidden_size: Width = 1024
    """Width of the residual stream."""
    num_layers: SmallInt = 12
    """Number of layers of the encoder."""
    num_decoder_layers: SmallInt = 12
    """Number of layers of the decoder, as many as of the encoder as published."""
    num_attention_heads: SmallInt = 16
    """Attention heads; must divide hidden_size."""
    intermediate_size: Width = 4096
    """Width of the feed-forward layer."""
    attention_dropout: Probability = 0.0
    """Dropout on attention probabilities."""
    activation_dropout: Probability = 0.0
    """Dropout between the two matrices of feed-forward layers."""
    scale_embedding: bool = True
    """Word vectors are multiplied by the root of hidden_size before positions are added, as published."""


MBART = replace(
    BART,
    name="mbart",
    title="mBART (Liu 2020)",
    section=MBartSection,
    export="ctxlm_ds.families.bart.export:MBART_EXPORT",
    tokenizer="unigram",
    tiny=lambda: tiny_bart("mbart", mask_ratio=0.35, sentence_end=None),
    vocab_size=250_027,
)
