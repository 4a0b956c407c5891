"""Memory of activations: what each layer keeps for the backward pass, and what passes through beside it.

In: a recipe, a layout, how the platform stores what it keeps. Out: bytes of a layer, of the embeddings and the heads.
Not here: how many micro-batches are held at once (memory.py).

Shape letters: b rows, s positions, p prediction slots, m sequences of a row, h width, f feed-forward width, n heads,
v vocabulary, w bytes of an element, t tensor-parallel ranks, T = b·s tokens. With LayerNorm before or after alike, a
layer keeps 8 tensors of width h (input of query/key/value, these three, attention's result, input of one LayerNorm,
input and output of the other) and 2 of width f. In 16 bits, with f = 4h and dropout, these are Korthikanti 2022's
34 T·h bytes; their 5·n·s²·b of scores are gone with fused attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from ctxlm_ds.data.stream.collate import prediction_slots
from ctxlm_ds.parallel.placement import vocabulary_rows_per_rank
from ctxlm_ds.planning.layouts import BYTES, Layout
from ctxlm_ds.planning.shapes import objective_terms, with_vocabulary
from ctxlm_ds.recipe.schema import RunConfig

FLOAT = 4
INDEX = 8
NORMS_OF_LAYER = 2
STATISTICS = 2
"""LayerNorm keeps mean and reciprocal deviation of each row, in fp32."""


@dataclass(frozen=True, slots=True)
class Platform:
    """How a device keeps what the backward pass needs."""

    keeps_scores: bool = False
    """Attention keeps s x s matrices: the plain kernel, and torch's on CPUs with attention dropout."""
    mask_bytes: int | None = 1
    """Bytes of an element of a dropout mask; None is an activation's (CPUs)."""


CUDA = Platform()
CPU = Platform(mask_bytes=None)


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes of one micro-batch on one rank."""

    layer: int
    """Kept by one transformer layer."""
    layer_input: int
    """What recomputation keeps of it."""
    embeddings: int
    heads: int
    """Kept from the last layer to the loss."""
    hidden: int
    """One tensor of hidden states, as it passes between pipeline stages."""
    workspace: int
    """Most that a layer, or the loss, needs for the moment beside what is kept."""


def activation_bytes(config: RunConfig, layout: Layout, platform: Platform = CUDA) -> ActivationBytes:
    """What one micro-batch keeps, by part of the model."""
    sizes = _Sizes.of(config, layout, platform)
    return ActivationBytes(
        layer=_layer(sizes),
        layer_input=sizes.hidden // sizes.split,
        embeddings=_embeddings(sizes),
        heads=_decoder_head(sizes) if config.model.is_decoder else _encoder_heads(sizes),
        hidden=sizes.hidden // sizes.split,
        workspace=_workspace(sizes),
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    config: RunConfig
    tokens: int
    rows: int
    width: int
    inner: int
    word_bytes: int
    tensor: int
    split: int
    vocabulary: int
    labels: int
    mask_bytes: int
    keeps_scores: bool

    @classmethod
    def of(cls, config: RunConfig, layout: Layout, platform: Platform) -> _Sizes:
        model, rows = with_vocabulary(config.model), layout.micro_batch_size
        assert model.vocab_size is not None
        word_bytes = BYTES[config.training.precision]
        return cls(
            config=config,
            tokens=rows * config.data.seq_length,
            rows=rows,
            width=model.hidden_size,
            inner=model.intermediate_size,
            word_bytes=word_bytes,
            tensor=layout.tensor,
            split=layout.token_split,
            vocabulary=vocabulary_rows_per_rank(model.vocab_size, layout.tensor, config.parallel.vocab_multiple),
            labels=rows * prediction_slots(config.data, config.objective),
            mask_bytes=platform.mask_bytes or word_bytes,
            keeps_scores=platform.keeps_scores or config.kernels.attention == "reference",
        )

    @property
    def hidden(self) -> int:
        return self.tokens * self.width * self.word_bytes

    @property
    def dropout_mask(self) -> int:
        return self.tokens * self.width * self.mask_bytes if self.config.model.hidden_dropout > 0 else 0


def _layer(x: _Sizes) -> int:
    inner = x.tokens * x.inner * x.word_bytes
    kept_inner = 1 if x.config.model.hidden_activation == "relu" else 2
    shared = 4 * x.hidden + 2 * x.dropout_mask + NORMS_OF_LAYER * STATISTICS * FLOAT * x.tokens
    split = 4 * x.hidden + kept_inner * inner + _attention(x)
    return shared // x.split + split // x.tensor


def _attention(x: _Sizes) -> int:
    """What attention keeps beside query, key, value and its result; of all heads."""
    heads, length = x.config.model.num_attention_heads, x.config.data.seq_length
    if not x.keeps_scores:
        return FLOAT * heads * x.tokens + _visible_keys(x)
    scores = heads * x.tokens * length
    probabilities = FLOAT if x.config.kernels.attention == "reference" else x.word_bytes
    if x.config.model.attention_dropout == 0.0:
        return scores * probabilities
    return scores * (probabilities + x.mask_bytes + x.word_bytes)


def _visible_keys(x: _Sizes) -> int:
    """The mask, added to the scores in their type: one row of keys, or a matrix where sequences share rows."""
    if x.config.kernels.attention == "varlen":
        return 0
    if x.config.data.shares_rows:
        return x.word_bytes * x.tokens * x.config.data.seq_length
    return 0 if x.config.model.is_decoder else x.word_bytes * x.tokens


def _embeddings(x: _Sizes) -> int:
    num_tables = 3 if x.config.model.family == "bert" else 2
    kept = x.dropout_mask
    if not x.config.model.is_decoder:
        kept += x.hidden + STATISTICS * FLOAT * x.tokens
    return INDEX * num_tables * x.tokens + kept // x.split


def _encoder_heads(x: _Sizes) -> int:
    vector = x.width * x.word_bytes
    kept_inner = 1 if x.config.model.hidden_activation == "relu" else 2
    predicted = x.labels * ((2 + kept_inner) * vector + STATISTICS * FLOAT + 2 * INDEX)
    sequences = x.rows * x.config.data.sequences_per_row if "next_sentence" in objective_terms(x.config) else 0
    pooled = 2 * sequences * vector
    final = (x.hidden + STATISTICS * FLOAT * x.tokens) // x.split if x.config.model.pre_layer_norm else 0
    return predicted + pooled + final + _loss(x)


def _decoder_head(x: _Sizes) -> int:
    final = x.hidden + STATISTICS * FLOAT * x.tokens if x.config.model.pre_layer_norm else 0
    return (x.hidden + final) // x.split + INDEX * x.labels + _loss(x)


def _loss(x: _Sizes) -> int:
    """Log probabilities in fp32."""
    return FLOAT * x.labels * x.vocabulary


def _workspace(x: _Sizes) -> int:
    """In a layer's backward pass the gradients of the feed-forward layer and of its input; at the loss the logits twice
    in the weights' type (with and without bias), once in fp32.
    """
    layer = 2 * x.tokens * x.inner * x.word_bytes // x.tensor + 2 * x.hidden
    loss = x.labels * x.vocabulary * (2 * x.word_bytes + FLOAT)
    return max(layer, loss)
