"""Attention inside each sequence of a row: plain softmax, torch's fused attention, FlashAttention over packed rows.

Shape letters: b rows, s positions of a row, t positions of a row of keys (s in self-attention), n heads, k heads of
keys and values (n unless grouped), d size of a head, m sequences of a row. The spec of a Need is an AttentionSpec.

A position sees the positions of its sequence: only itself and earlier ones if causal, only near ones in a window.
Padding sees padding or, if a row holds one sequence, that sequence. A position without a key of its sequence sees every
key of its row, so no softmax is empty and nothing is NaN. The results at such positions are never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.errors import KernelError
from ctxlm_ds.kernels.implementation import Implementation, Need
from ctxlm_ds.kernels.linear import computes_in_float32

FLASH_MAX_HEAD_SIZE = 256
FLASH_MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of a layer; the implementation is chosen for it."""

    head_size: int
    causal: bool = False
    """Positions see no later ones."""
    shares_rows: bool = False
    """A row holds several sequences that never see each other."""
    dropout: float = 0.0
    """Dropout of the attention probabilities in training."""
    window: int | None = None
    """Most positions that a position sees to each side of itself (if causal: to the left); None sees all."""
    grouped: bool = False
    """Several query heads share a head of keys and values: k < n, and n is a multiple of k."""
    bias: bool = False
    """Each call brings a bias of the scores."""
    cross: bool = False
    """Keys and values are of another sequence than the queries."""
    scale: float | None = None
    """Factor of the products of queries and keys; None is 1 / sqrt(head_size)."""

    @property
    def ordered(self) -> bool:
        """True if visibility depends on the places of query and key."""
        return self.causal or self.window is not None

    def __post_init__(self) -> None:
        if self.cross and self.ordered:
            raise ValueError("cross attention is neither causal nor windowed: its two sequences share no positions")
        if self.window is not None and self.window < 1:
            raise ValueError(f"an attention window is at least 1 position wide, not {self.window}")


class Sequences(NamedTuple):
    """The sequences of the queries' rows, and for cross attention those of the keys' rows (data/sample.py)."""

    ids: Tensor
    """[b, s], 1 to m for the sequences of a row, 0 at padding."""
    starts: Tensor
    """[b, m + 1], first position of each sequence and of the padding; s if there is none."""
    key_ids: Tensor | None = None
    """[b, t], the queries with id i see the keys with id i."""
    key_starts: Tensor | None = None
    """[b, m + 1]"""


class AttentionKernel(Protocol):
    """query [b, s, n, d], key and value [b, t, k, d] -> [b, s, n, d].

    p is the dropout of the attention probabilities, 0 in evaluation. bias [n, s, t] or [b, n, s, t] is added to the
    scaled scores.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, p: float, bias: Tensor | None = None
    ) -> Tensor: ...


def same_sequence_mask(sequences: Sequences) -> Tensor:
    """Return [b, 1, s, t] bool, True if query and key belong to the same sequence (or both to padding)."""
    query_ids = sequences.ids[:, None, :, None]
    if sequences.key_ids is None:
        return query_ids == sequences.ids[:, None, None, :]
    mask = query_ids == sequences.key_ids[:, None, None, :]
    return mask | ~mask.any(-1, keepdim=True)


def first_sequence_mask(key_ids: Tensor) -> Tensor:
    """Return the keys [b, t] of rows with one sequence as [b, 1, 1, t] bool; all keys if the row is empty."""
    return (key_ids == key_ids[:, :1])[:, None, None, :]


def visible_keys(spec: AttentionSpec, sequences: Sequences) -> Tensor:
    """Return [b, 1, s, t] bool, True if the query sees the key."""
    mask = same_sequence_mask(sequences)
    return mask & place_mask(spec, mask.shape[-1], mask.device) if spec.ordered else mask


def place_mask(spec: AttentionSpec, length: int, device: torch.device) -> Tensor:
    """Return [s, s] bool, True if the key's place in the row is one that the query sees."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device)
    if spec.window is None:
        return mask.tril() if spec.causal else mask
    return mask.tril(0 if spec.causal else spec.window).triu(-spec.window)


@dataclass(frozen=True)
class ReferenceAttention:
    """softmax(scale QK^T + bias) V (Vaswani 2017, eq. 1), the softmax at least in float32, dropout on its result."""

    spec: AttentionSpec

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, p: float, bias: Tensor | None = None
    ) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        group = query.shape[1] // key.shape[1]
        if group > 1:
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if self.spec.scale is None else self.spec.scale
        scores = query @ key.transpose(-1, -2) * scale
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~visible_keys(self.spec, sequences), float("-inf"))
        softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
        probabilities = torch.softmax(scores, dim=-1, dtype=softmax_dtype).to(value.dtype)
        return (F.dropout(probabilities, p) @ value).transpose(1, 2)


@dataclass(frozen=True)
class SdpaAttention:
    """torch.nn.functional.scaled_dot_product_attention with the smallest mask that hides what must be hidden."""

    spec: AttentionSpec
    in_float32: bool = False
    """Compute in float32 and round the result."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, p: float, bias: Tensor | None = None
    ) -> Tensor:
        dtype = query.dtype
        if self.in_float32:
            query, key, value = query.float(), key.float(), value.float()
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        is_causal = self._needs_no_mask and bias is None
        mask = None if is_causal else self._mask(sequences)
        if mask is not None and bias is not None:
            bias = bias if bias.ndim == 4 else bias[None]
            mask = bias.to(query.dtype).masked_fill(~mask, float("-inf"))
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=p, is_causal=is_causal,
            scale=self.spec.scale, enable_gqa=self.spec.grouped,
        )  # fmt: skip
        return context.transpose(1, 2).to(dtype)

    @property
    def _needs_no_mask(self) -> bool:
        """True if torch's causal mask suffices: padding comes after the sequence, and its results are not read."""
        return self.spec.causal and not self.spec.shares_rows and self.spec.window is None

    def _mask(self, sequences: Sequences) -> Tensor:
        """Return a bool mask of visible keys: [b, 1, s, t], [b, 1, 1, t] or [s, s]."""
        spec, ids = self.spec, sequences.ids
        if not spec.shares_rows and not spec.ordered:
            return first_sequence_mask(ids if sequences.key_ids is None else sequences.key_ids)
        if spec.causal and not spec.shares_rows:
            return place_mask(spec, ids.shape[1], ids.device)
        return visible_keys(spec, sequences)


def cumulative_lengths(sequence_starts: Tensor, seq_length: int) -> Tensor:
    """Map sequence_starts [b, m + 1] to the bounds of all sequences in the flattened rows, [b * (m + 1) + 1] int32.

    The padding of each row counts as a sequence. Slots without a sequence are empty, and FlashAttention skips them.
    """
    num_rows = sequence_starts.shape[0]
    row_starts = torch.arange(num_rows, device=sequence_starts.device)[:, None] * seq_length
    bounds = (sequence_starts + row_starts).flatten()
    return F.pad(bounds, (0, 1), value=num_rows * seq_length).to(torch.int32)


@dataclass(frozen=True)
class VarlenAttention:
    """FlashAttention over the flattened rows (torch.nn.attention.varlen); its work is the sum of squared lengths."""

    spec: AttentionSpec

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, p: float, bias: Tensor | None = None
    ) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if p > 0.0:
            raise KernelError(f"kernels.attention: `varlen` has no attention dropout, but it is {p}")
        if bias is not None:
            raise KernelError("kernels.attention: `varlen` adds no bias to the scores, but one was given")
        (num_rows, length), key_length = query.shape[:2], key.shape[1]
        bounds = cumulative_lengths(sequences.starts, length)
        key_starts = sequences.key_starts
        key_bounds = bounds if key_starts is None else cumulative_lengths(key_starts, key_length)
        side = -1 if self.spec.window is None else self.spec.window
        context = varlen_attn(
            query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), bounds, key_bounds, length, key_length,
            scale=self.spec.scale, window_size=(side, 0 if self.spec.causal else side), enable_gqa=self.spec.grouped,
        )  # fmt: skip
        return context.unflatten(0, (num_rows, length))


def why_varlen_cannot_run(need: Need) -> str | None:
    """Return the reason, or None if `varlen` runs here."""
    spec: AttentionSpec = need.spec
    if need.device_type != "cuda":
        return f"it needs a CUDA device, and this run is on {need.device_type}"
    if not torch.cuda.is_available():
        return "it needs a CUDA device, and torch finds none"
    if need.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bf16 or fp16 only, and the precision is {need.dtype}"
    if spec.dropout > 0.0:
        return f"it has no attention dropout, and model.attention_dropout is {spec.dropout}"
    if spec.bias:
        return "it adds no bias to the scores, and this model's attention has one"
    if spec.head_size > FLASH_MAX_HEAD_SIZE or spec.head_size % 8:
        return f"heads must be a multiple of 8 and at most {FLASH_MAX_HEAD_SIZE} wide, and they are {spec.head_size}"
    capability = torch.cuda.get_device_capability()
    if capability < FLASH_MIN_CAPABILITY:
        return f"it needs compute capability 8.0 (Ampere) or later, and this device has {capability[0]}.{capability[1]}"
    return None


IMPLEMENTATIONS = (
    Implementation(
        "varlen",
        lambda need: VarlenAttention(need.spec),
        why_varlen_cannot_run,
        suits=lambda need: need.spec.shares_rows or need.spec.window is not None,
    ),
    Implementation("sdpa", lambda need: SdpaAttention(need.spec, computes_in_float32(need))),
    Implementation("reference", lambda need: ReferenceAttention(need.spec)),
)
