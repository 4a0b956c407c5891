"""Attention inside each sequence of a row: plain softmax and torch's fused attention, and the table of all kernels.

Shape letters as in kernels/attention_spec.py, which says what a position sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.kernels.attention_bmm import BmmAttention, suits_bmm, why_bmm_cannot_run
from ctxlm_ds.kernels.attention_spec import (
    AttentionCall,
    AttentionSpec,
    Sequences,
    default_keys,
    first_sequence_mask,
    once,
    place_mask,
    probability_dropout,
    visible_keys,
)
from ctxlm_ds.kernels.attention_varlen import VarlenAttention, use_flash3, why_flash3_cannot_run, why_varlen_cannot_run
from ctxlm_ds.kernels.implementation import Implementation
from ctxlm_ds.kernels.linear import computes_in_float32


@dataclass(frozen=True)
class ReferenceAttention:
    """softmax(scale QK^T + bias) V (Vaswani 2017, eq. 1), the softmax at least in float32, dropout on its result."""

    DRAWS_BY_KEY: ClassVar[bool] = True
    spec: AttentionSpec

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        sequences, p, bias, keys = call
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

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        sequences, p, bias, _ = call
        dtype = query.dtype
        if self.in_float32:
            query, key, value = query.float(), key.float(), value.float()
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        is_causal = self._needs_no_mask and bias is None
        mask = None if is_causal else once(sequences, "sdpa mask", self.spec, lambda: self._mask(sequences))
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
        spec = self.spec
        return spec.causal and not spec.shares_rows and spec.window is None and not spec.ranked

    def _mask(self, sequences: Sequences) -> Tensor:
        """Return a bool mask of visible keys: [b, 1, s, t], [b, 1, 1, t] or [s, s]."""
        spec, ids = self.spec, sequences.ids
        if not spec.shares_rows and not spec.ordered and not spec.ranked:
            return first_sequence_mask(ids if sequences.key_ids is None else sequences.key_ids)
        if spec.causal and not spec.shares_rows and not spec.ranked:
            return place_mask(spec, ids.shape[1], ids.device)
        return visible_keys(spec, sequences)


IMPLEMENTATIONS = (
    Implementation(
        "bmm",
        lambda need: BmmAttention(
            need.spec, computes_in_float32(need), SdpaAttention(need.spec, computes_in_float32(need))
        ),
        why_bmm_cannot_run,
        suits=suits_bmm,
    ),
    Implementation(
        "varlen",
        lambda need: VarlenAttention(need.spec),
        why_varlen_cannot_run,
        suits=lambda need: need.spec.shares_rows or need.spec.window is not None,
    ),
    # Not measured yet: only by name.
    Implementation("flash3", use_flash3, why_flash3_cannot_run, suits=lambda need: False),
    Implementation("sdpa", lambda need: SdpaAttention(need.spec, computes_in_float32(need))),
    Implementation("reference", lambda need: ReferenceAttention(need.spec)),
)
