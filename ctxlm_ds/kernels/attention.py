"""Attention inside each sequence of a row: plain softmax, torch's fused attention, FlashAttention; all kernels' table.

Shape letters as in kernels/attention_spec.py, which says what a position sees.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.errors import KernelError
from ctxlm_ds.kernels.attention_bmm import LONG_ROW, BmmAttention, needs_square_mask, suits_bmm, why_bmm_cannot_run
from ctxlm_ds.kernels.attention_spec import (
    AttentionCall,
    AttentionKernel,
    AttentionSpec,
    Sequences,
    default_keys,
    first_sequence_mask,
    once,
    place_mask,
    probability_dropout,
    visible_keys,
)
from ctxlm_ds.kernels.implementation import Implementation, Need
from ctxlm_ds.kernels.linear import computes_in_float32


@dataclass(frozen=True)
class ReferenceAttention:
    """softmax(scale QK^T + bias) V (Vaswani 2017, eq. 1), the softmax at least in float32, dropout on its result."""

    DRAWS_BY_KEY: ClassVar[bool] = True
    spec: AttentionSpec

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        sequences, p, bias, keys, _ = call
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        group = query.shape[1] // key.shape[1]
        if group > 1:
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if self.spec.scale is None else self.spec.scale
        scores = query @ key.transpose(-1, -2) * scale
        if bias is not None:
            scores = scores + bias
        hidden = once(sequences, "hidden keys", self.spec, lambda: ~visible_keys(self.spec, sequences))
        scores = scores.masked_fill(hidden, float("-inf"))
        softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
        probabilities = torch.softmax(scores, dim=-1, dtype=softmax_dtype).to(value.dtype)
        if p > 0.0:
            probabilities = probability_dropout(probabilities, p, keys or default_keys(query))
        return (probabilities @ value).transpose(1, 2)


@dataclass(frozen=True)
class SdpaAttention:
    """torch.nn.functional.scaled_dot_product_attention with the smallest mask that hides what must be hidden."""

    spec: AttentionSpec
    in_float32: bool = False
    """Compute in float32 and round the result."""
    long_rows: AttentionKernel | None = None
    """Computes long rows without dropout for which this would make a mask of s times t."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        sequences, p, bias, *_ = call
        if self.long_rows is not None and p == 0.0 and bias is None and query.shape[1] > LONG_ROW:
            return self.long_rows(query, key, value, call)
        dtype = query.dtype
        if self.in_float32:
            query, key, value = query.float(), key.float(), value.float()
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        spec = self.spec
        # torch's causal mask suffices where padding comes after the sequence: its results are not read.
        is_causal = spec.causal and bias is None and spec.window is None and not (spec.shares_rows or spec.ranked)
        mask = None if is_causal else once(sequences, "sdpa mask", self.spec, lambda: self._mask(sequences))
        if mask is not None and bias is not None:
            bias = bias if bias.ndim == 4 else bias[None]
            mask = bias.to(query.dtype).masked_fill(~mask, float("-inf"))
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=p, is_causal=is_causal,
            scale=self.spec.scale, enable_gqa=self.spec.grouped,
        )  # fmt: skip
        return context.transpose(1, 2).to(dtype)

    def _mask(self, sequences: Sequences) -> Tensor:
        """Return a bool mask of visible keys: [b, 1, s, t], [b, 1, 1, t] or [s, s]."""
        spec, ids = self.spec, sequences.ids
        if not spec.shares_rows and not spec.ordered and not spec.ranked:
            return first_sequence_mask(ids if sequences.key_ids is None else sequences.key_ids)
        if spec.causal and not spec.shares_rows and not spec.ranked:
            return place_mask(spec, ids.shape[1], ids.device)
        return visible_keys(spec, sequences)


FLASH_MAX_HEAD_SIZE = 256
FLASH_MIN_CAPABILITY = (8, 0)
HOPPER = 9


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

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        sequences, p, bias, *_ = call
        if bias is not None:
            raise KernelError("kernels.attention: `varlen` adds no bias to the scores, but one was given")
        (num_rows, length), key_length = query.shape[:2], key.shape[1]
        bounds, key_bounds = once(sequences, "bounds", self.spec, lambda: _bounds(sequences, length, key_length))
        side = -1 if self.spec.window is None else self.spec.window
        window = side, 0 if self.spec.causal else side
        inputs = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        settings = *inputs, bounds, key_bounds, length, key_length
        if p > 0.0:
            # The operation that varlen_attn calls with a dropout of 0; it has a gradient.
            context = torch.ops.aten._flash_attention_forward(
                *settings, p, window == (-1, 0), False,
                scale=self.spec.scale, window_size_left=window[0], window_size_right=window[1],
            )[0]  # fmt: skip
        else:
            from torch.nn.attention.varlen import varlen_attn

            context = varlen_attn(*settings, scale=self.spec.scale, window_size=window, enable_gqa=self.spec.grouped)
        return context.unflatten(0, (num_rows, length))


def _bounds(sequences: Sequences, length: int, key_length: int) -> tuple[Tensor, Tensor]:
    bounds = cumulative_lengths(sequences.starts, length)
    key_starts = sequences.key_starts
    return bounds, bounds if key_starts is None else cumulative_lengths(key_starts, key_length)


def why_varlen_cannot_run(need: Need) -> str | None:
    """Return the reason, or None if `varlen` runs here."""
    spec: AttentionSpec = need.spec
    if need.device_type != "cuda":
        return f"it needs a CUDA device, and this run is on {need.device_type}"
    if not torch.cuda.is_available():
        return "it needs a CUDA device, and torch finds none"
    if need.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bf16 or fp16 only, and the precision is {need.dtype}"
    if spec.bias:
        return "it adds no bias to the scores, and this model's attention has one"
    if spec.ranked:
        return "it hides keys by their place only, and this model's attention by their rank"
    if spec.head_size > FLASH_MAX_HEAD_SIZE or spec.head_size % 8:
        return f"heads must be a multiple of 8 and at most {FLASH_MAX_HEAD_SIZE} wide, and they are {spec.head_size}"
    capability = torch.cuda.get_device_capability()
    if capability < FLASH_MIN_CAPABILITY:
        return f"it needs compute capability 8.0 (Ampere) or later, and this device has {capability[0]}.{capability[1]}"
    return None


def suits_varlen(need: Need) -> bool:
    """Return whether other rows would need a mask: of several sequences, of a window, of padding seen from before."""
    spec: AttentionSpec = need.spec
    return spec.shares_rows or spec.window is not None or not (spec.causal or spec.cross)


def use_flash3(need: Need) -> VarlenAttention:
    """Make torch compute every FlashAttention of this process by FlashAttention-3."""
    from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

    if current_flash_attention_impl() != "FA3":
        activate_flash_attention_impl("FA3")
    return VarlenAttention(need.spec)


def why_flash3_cannot_run(need: Need) -> str | None:
    """Return the reason, or None if `flash3` runs here."""
    problem = why_varlen_cannot_run(need)
    if problem is not None:
        return problem
    if need.spec.dropout > 0.0:
        return f"FlashAttention-3 has no dropout, and model.attention_dropout is {need.spec.dropout}"
    major, minor = torch.cuda.get_device_capability()
    if major != HOPPER:
        return f"FlashAttention-3 needs compute capability 9.0 (Hopper), and this device has {major}.{minor}"
    if importlib.util.find_spec("flash_attn_interface") is None:
        return "flash_attn_interface (FlashAttention-3) is not installed"
    return None


def blocks_of(need: Need) -> BmmAttention | None:
    """Return what computes long rows on a CPU by tiles, without the mask that torch's attention needs for them."""
    if why_bmm_cannot_run(need) is not None or not needs_square_mask(need.spec):
        return None
    return BmmAttention(need.spec, computes_in_float32(need))


IMPLEMENTATIONS = (
    Implementation(
        "bmm",
        lambda need: BmmAttention(
            need.spec, computes_in_float32(need), SdpaAttention(need.spec, computes_in_float32(need))
        ),
        why_bmm_cannot_run,
        suits=suits_bmm,
    ),
    Implementation("varlen", lambda need: VarlenAttention(need.spec), why_varlen_cannot_run, suits=suits_varlen),
    # Not measured yet: only by name.
    Implementation("flash3", use_flash3, why_flash3_cannot_run, suits=lambda need: False),
    Implementation("sdpa", lambda need: SdpaAttention(need.spec, computes_in_float32(need), blocks_of(need))),
    Implementation("reference", lambda need: ReferenceAttention(need.spec)),
)
