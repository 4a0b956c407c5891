"""Attention inside each sequence of a row: plain softmax, torch's fused attention, FlashAttention over packed rows.

Shape letters: b rows, s positions of a row, n heads, d size of a head, m sequences of a row.
Positions see exactly the positions with their own sequence id; padding sees padding (or, where a row
holds one sequence, that sequence), so that no softmax is empty and nothing is NaN. What padding positions
hold afterwards is never read. Causal attention sees of these only the position itself and earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.errors import KernelError

FLASH_MAX_HEAD_SIZE = 256
FLASH_MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer needs of attention; the implementation is chosen for it (dispatch.py)."""

    head_size: int
    causal: bool = False
    """Positions see earlier ones only."""
    shares_rows: bool = False
    """A row holds several sequences that never see each other."""
    dropout: float = 0.0
    """Dropout of the attention probabilities in training."""


class AttentionKernel(Protocol):
    """query, key, value [b, s, n, d], sequence_ids [b, s], sequence_starts [b, m + 1] (data/sample.py) -> [b, s, n, d].

    dropout_p is the dropout of the attention probabilities, 0 in evaluation.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, sequence_ids: Tensor, sequence_starts: Tensor, dropout_p: float
    ) -> Tensor: ...


def same_sequence_mask(sequence_ids: Tensor) -> Tensor:
    """[b, s] -> [b, 1, s, s] bool, True where query and key belong to the same sequence (or both to padding)."""
    return sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :]


def first_sequence_mask(sequence_ids: Tensor) -> Tensor:
    """[b, s] -> [b, 1, 1, s] bool for rows of one sequence: its keys; all keys where the row is empty."""
    return (sequence_ids == sequence_ids[:, :1])[:, None, None, :]


def causal_mask(seq_length: int, device: torch.device) -> Tensor:
    """[s, s] bool, True where the key is the query's position or an earlier one."""
    return torch.ones(seq_length, seq_length, dtype=torch.bool, device=device).tril()


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequence_ids: Tensor,
    sequence_starts: Tensor,
    dropout_p: float,
    causal: bool = False,
) -> Tensor:
    """softmax(QK^T / sqrt(d)) V (Vaswani 2017, eq. 1), the softmax at least in float32, dropout on its result."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    visible = same_sequence_mask(sequence_ids)
    if causal:
        visible = visible & causal_mask(scores.shape[-1], scores.device)
    scores = scores.masked_fill(~visible, float("-inf"))
    softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
    probabilities = torch.softmax(scores, dim=-1, dtype=softmax_dtype).to(value.dtype)
    return (F.dropout(probabilities, dropout_p) @ value).transpose(1, 2)


class SdpaAttention:
    """torch.nn.functional.scaled_dot_product_attention with a mask of visible keys."""

    def __init__(self, packing: bool, compute_in_float32: bool = False, causal: bool = False) -> None:
        """Rows of one sequence (`packing=False`) need only a key mask [b, 1, 1, s] instead of [b, 1, s, s].

        Causal ones need no mask at all: padding comes after the sequence, where none of its positions looks.
        """
        self.packing = packing
        self.compute_in_float32 = compute_in_float32
        self.causal = causal

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, sequence_ids: Tensor, sequence_starts: Tensor, dropout_p: float
    ) -> Tensor:
        dtype = query.dtype
        if self.compute_in_float32:
            query, key, value = query.float(), key.float(), value.float()
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        mask, is_causal = self._mask(sequence_ids)
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal
        )
        return context.transpose(1, 2).to(dtype)

    def _mask(self, sequence_ids: Tensor) -> tuple[Tensor | None, bool]:
        """The mask of visible keys, and whether torch's own causal one takes its place."""
        if self.causal and not self.packing:
            return None, True
        if not self.packing:
            return first_sequence_mask(sequence_ids), False
        mask = same_sequence_mask(sequence_ids)
        if self.causal:
            mask = mask & causal_mask(sequence_ids.shape[1], sequence_ids.device)
        return mask, False


def cumulative_lengths(sequence_starts: Tensor, seq_length: int) -> Tensor:
    """sequence_starts [b, m + 1] -> [b * (m + 1) + 1] int32: bounds of all sequences in the flattened rows.

    Every row's padding is a sequence of its own; slots without a sequence are empty ones, which FlashAttention skips.
    """
    num_rows = sequence_starts.shape[0]
    row_starts = torch.arange(num_rows, device=sequence_starts.device)[:, None] * seq_length
    bounds = (sequence_starts + row_starts).flatten()
    return F.pad(bounds, (0, 1), value=num_rows * seq_length).to(torch.int32)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequence_ids: Tensor,
    sequence_starts: Tensor,
    dropout_p: float,
    causal: bool = False,
) -> Tensor:
    """FlashAttention over the flattened rows (torch.nn.attention.varlen): work goes with the sum of squared lengths."""
    from torch.nn.attention.varlen import varlen_attn

    if dropout_p > 0.0:
        raise KernelError(f"kernels.attention: `varlen` has no attention dropout, but it is {dropout_p}")
    num_rows, seq_length = query.shape[:2]
    bounds = cumulative_lengths(sequence_starts, seq_length)
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    window = (-1, 0) if causal else (-1, -1)
    context = varlen_attn(query, key, value, bounds, bounds, seq_length, seq_length, window_size=window)
    return context.unflatten(0, (num_rows, seq_length))


def why_varlen_cannot_run(device_type: str, dtype: torch.dtype, attention_dropout: float, head_size: int) -> str | None:
    """The reason, or None where `varlen` runs here."""
    if device_type != "cuda":
        return f"it needs a CUDA device, and this run is on {device_type}"
    if not torch.cuda.is_available():
        return "it needs a CUDA device, and torch finds none"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bf16 or fp16 only, and the precision is {dtype}"
    if attention_dropout > 0.0:
        return f"it has no attention dropout, and model.attention_dropout is {attention_dropout}"
    if head_size > FLASH_MAX_HEAD_SIZE or head_size % 8:
        return f"heads must be a multiple of 8 and at most {FLASH_MAX_HEAD_SIZE} wide, and they are {head_size}"
    capability = torch.cuda.get_device_capability()
    if capability < FLASH_MIN_CAPABILITY:
        return f"it needs compute capability 8.0 (Ampere) or later, and this device has {capability[0]}.{capability[1]}"
    return None
