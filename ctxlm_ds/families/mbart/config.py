"""mBART's settings (Liu 2020, arXiv:2001.08210; fairseq/models/bart/model.py, `mbart_large`)."""

from __future__ import annotations

from typing import ClassVar

from ctxlm_ds.families.bart.config import BartSection, tiny_bart
from ctxlm_ds.families.base import Family
from ctxlm_ds.recipe.sections import Probability, SmallInt, Width


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


MBART = Family(
    name="mbart",
    title="mBART (Liu 2020)",
    section=MBartSection,
    layers="ctxlm_ds.families.bart.layers:bart_layers",
    export="ctxlm_ds.families.mbart.export:EXPORT",
    outputs=frozenset({"decoder_logits"}),
    objective="text_infilling",
    sample_format="doc_sentences",
    tokenizer="unigram",
    tiny=lambda: tiny_bart("mbart", mask_ratio=0.35, sentence_end=None),
    vocab_size=250_027,
)
