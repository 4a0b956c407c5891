"""Attention with a bias of the scores and with dropout by key, in tiles: probabilities never reach the memory.

Sums have a fixed order, so that two runs give equal bits. Shape letters as in kernels/attention_spec.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor

from ctxlm_ds.kernels.attention_bmm import limits
from ctxlm_ds.kernels.attention_spec import AttentionCall, AttentionSpec, Sequences, default_keys, once
from ctxlm_ds.kernels.dropout import LANE_VALUES, threshold_and_factor
from ctxlm_ds.kernels.triton.attention_tiles import bias_kernel, context_kernel, key_value_kernel, query_kernel
from ctxlm_ds.kernels.triton.launch import dense, differentiable, launch, operator


def _tile(queries: int, keys: int, num_warps: int, num_stages: int = 2) -> dict[str, int]:
    """Return the constants of a kernel's launch."""
    return {"M": queries, "N": keys, "num_warps": num_warps, "num_stages": num_stages}


WIDE, SQUARE, SMALL, FLAT = _tile(128, 64, 8), _tile(64, 64, 8), _tile(64, 32, 4), _tile(32, 64, 8)
SPREAD = _tile(64, 32, 8)
PLAIN, TINY = _tile(32, 32, 8, 1), _tile(16, 16, 8, 1)
EVEN = 16
"""Triton compiles another kernel where an integer is a multiple of 16."""
LARGE_CAPABILITIES = 9, 10
"""Major numbers of capabilities with 227 KiB of shared memory, whose products read their matrices there."""


def tiles(dtype: torch.dtype, head_size: int, is_even: bool = True) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tiles of the context and of the gradients, the largest whose numbers fit a device's registers.

    With lengths that are not `is_even`, multiples of EVEN, addresses take more registers.
    """
    if dtype == torch.float32:
        return PLAIN, TINY if head_size > 64 else PLAIN
    is_large = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in LARGE_CAPABILITIES
    small = SMALL if is_even else SPREAD
    wide = WIDE if is_even or head_size <= 64 else SPREAD
    of_gradients = FLAT if head_size > 64 else SQUARE if is_large else small
    return wide if is_large else small, of_gradients


def _is_even(query: Tensor, key: Tensor) -> bool:
    return query.shape[1] % EVEN == 0 and key.shape[1] % EVEN == 0


@dataclass(frozen=True)
class TritonAttention:
    """ReferenceAttention's results from scores in fp32; no kernel reads the ranks of a spec."""

    DRAWS_BY_KEY: ClassVar[bool] = True
    spec: AttentionSpec

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        sequences, p, bias, keys, _ = call
        group = query.shape[2] // key.shape[2]
        if group > 1:
            key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
        if bias is not None and bias.ndim == 3:
            bias = bias[None]
        spans = once(sequences, "spans", self.spec, lambda: spans_of(self.spec, sequences))
        scale = query.shape[-1] ** -0.5 if self.spec.scale is None else self.spec.scale
        draw, *heads = keys or default_keys(query)
        return attend(query, key, value, *spans, bias, draw if p > 0.0 else None, scale, p, *heads)[0]


def spans_of(spec: AttentionSpec, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Return the spans [b, 2, s] of keys that each query sees, and [b, 2, t] of queries that see each key.

    A span is a first place and the one after the last. A position without others of its sequence sees all of them.
    """
    ids, starts, key_ids, key_starts, _ = sequences
    if key_ids is None or key_starts is None:
        key_ids, key_starts = ids, starts
    before, after = limits(spec)
    return _spans(ids, key_ids, key_starts, before, after), _spans(key_ids, ids, starts, after, before)


def _spans(ids: Tensor, others: Tensor, starts: Tensor, before: int, after: int) -> Tensor:
    """Find the places of the sequences `ids` [b, s] in rows of `others` [b, t] with these starts [b, m + 1]."""
    count, is_padding = others.shape[1], ids == 0
    padding = (others > 0).sum(1, keepdim=True)
    first = torch.where(is_padding, padding, starts.gather(1, (ids - 1).clamp_min(0)))
    end = starts.gather(1, ids).masked_fill(is_padding, count)
    alone = first >= end
    first, end = first.masked_fill(alone, 0), end.masked_fill(alone, count)
    places = torch.arange(ids.shape[1], device=ids.device)
    return torch.stack((torch.maximum(first, places - before), torch.minimum(end, places + after + 1)), 1).int()


def _prepared(
    heads: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, scale: float, p: float, first_head: int, num_heads: int
) -> tuple[list[Tensor], Tensor | None, tuple[float, ...]]:
    """Return tensors [b, s, n, d] whose heads and rows are dense, a dense bias, and a kernel's numbers."""
    laid = []
    for x in heads:
        stride = x.stride(1)
        laid.append(x if x.stride() == (x.shape[1] * stride, stride, x.shape[3], 1) else x.contiguous())
    threshold, factor = threshold_and_factor(p)
    # The kernels compare all 32 bits of a signed number, whose upper half draws.
    limit = (threshold - LANE_VALUES // 2) * LANE_VALUES
    shape = heads[0].shape[1], heads[1].shape[1], heads[0].shape[2], 1 if bias is None else bias.shape[0]
    numbers = *shape, *(x.stride(1) for x in laid), scale, first_head, num_heads, limit, factor
    return laid, bias if bias is None else dense(bias), numbers


@operator(
    "attention(Tensor query, Tensor key, Tensor value, Tensor spans, Tensor key_spans, Tensor? bias, Tensor? draw, "
    "float scale, float p, SymInt first_head, SymInt num_heads) -> (Tensor, Tensor)"
)
def attend(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor, key_spans: Tensor, bias: Tensor | None,
    draw: Tensor | None, *settings: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the context [b, s, n, d], and the logarithms to base 2 of the sums of probabilities [b, n, s]."""
    rows, length, heads, size = query.shape
    inputs, bias, numbers = _prepared((query, key, value), bias, *settings)
    context = torch.empty_like(query, memory_format=torch.contiguous_format)
    log_sums = query.new_empty((rows, heads, length), dtype=torch.float32)
    tile = tiles(query.dtype, size, _is_even(query, key))[0]
    grid = triton.cdiv(length, tile["M"]), rows * heads
    launch(context_kernel, grid, *inputs, spans, bias, draw, context, log_sums, *numbers, D=size, **tile)
    return context, log_sums


@operator(
    "attention_gradients(Tensor gradient, Tensor?[] saved, float scale, float p, SymInt first_head, SymInt num_heads, "
    "bool with_bias) -> (Tensor, Tensor, Tensor, Tensor)"
)
def gradients(
    gradient: Tensor, saved: list[Any], scale: float, p: float, first_head: int, num_heads: int, with_bias: bool
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys, values, and of the bias (empty without `with_bias`).

    `saved` are the results of `attend` and its tensors.
    """
    context, log_sums, query, key, value, spans, key_spans, bias, draw = saved
    rows, length, heads, size = query.shape
    laid, bias, numbers = _prepared((query, key, value), bias, scale, p, first_head, num_heads)
    inputs, statistics = (dense(gradient), *laid, spans), (bias, draw, log_sums, torch.empty_like(log_sums))
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in laid]
    of_bias = torch.empty_like(bias) if with_bias else query.new_empty(0)
    tile = tiles(query.dtype, size, _is_even(query, key))[1]
    settings = {"D": size, **tile}
    of_queries, of_keys = triton.cdiv(length, tile["M"]), triton.cdiv(key.shape[1], tile["N"])
    # This kernel writes the last of the statistics, which the others read.
    launch(query_kernel, (of_queries, rows * heads), context, *inputs, *statistics, found[0], *numbers, **settings)
    grid: tuple[int, ...] = of_keys, rows * heads
    launch(key_value_kernel, grid, *inputs, key_spans, *statistics, *found[1:], *numbers, **settings)
    if with_bias and bias is not None:
        grid = of_queries, of_keys, bias.shape[0] * heads
        launch(bias_kernel, grid, *inputs, *statistics, of_bias, rows, *numbers, **settings)
    return *found, of_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.settings = inputs[7:]
    ctx.save_for_backward(*output, *inputs[:7])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 11
    with_bias = ctx.needs_input_grad[5]
    *found, of_bias = gradients(gradient, list(ctx.saved_tensors), *ctx.settings, with_bias)
    return *found, None, None, of_bias if with_bias else None, *(None,) * 5


differentiable(attend, _keep, _backward)
