"""Attention with a bias of the scores and with dropout by key, in tiles: probabilities never reach the memory.

A kernel has a tile of M queries or of N keys of one head, and walks over the tiles of the others that any of its
places sees. Each query sees one range of keys: its span. Scores are powers of two, in fp32. Sums have a fixed order, so
that two runs give equal bits. Queries, keys and values are [b, s, n, d] with a stride between places, log_sums and
deltas [b, n, s], a bias [g, n, s, t] with g of 1 or b; shape letters as in kernels/attention_spec.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ctxlm_ds.kernels.attention_bmm import limits
from ctxlm_ds.kernels.attention_spec import AttentionCall, AttentionSpec, Sequences, default_keys, once
from ctxlm_ds.kernels.dropout import LANE_VALUES, threshold_and_factor
from ctxlm_ds.kernels.triton.dropout import GAMMA, mix
from ctxlm_ds.kernels.triton.launch import dense, differentiable, launch, operator

LOG2_E = tl.constexpr(1.4426950408889634)
HIDDEN = tl.constexpr(-1e30)


@triton.jit
def tile_of(x, row, head, start, count, stride, PLACES: tl.constexpr, D: tl.constexpr):
    """Return the addresses of places of a head [count, D] from `start`, and which are before the end."""
    place = tl.arange(0, PLACES)[:, None]
    base = x + (row * count + start).to(tl.int64) * stride + head * D
    return base + place * stride + tl.arange(0, D)[None, :], start + place < count


@triton.jit
def load_tile(x, row, head, start, count, stride, PLACES: tl.constexpr, D: tl.constexpr):
    """Load places of a head; those after the last are 0."""
    at, inside = tile_of(x, row, head, start, count, stride, PLACES, D)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_tile(out, value, row, head, start, count, stride, PLACES: tl.constexpr, D: tl.constexpr):
    """Store places of a head."""
    at, inside = tile_of(out, row, head, start, count, stride, PLACES, D)
    tl.store(at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def load_span(spans, row, at, count, others):
    """Load the first of the others that each place sees, and the one after the last; the first place and the last."""
    base = spans + row * 2 * count + at
    first = tl.load(base, mask=at < count, other=others)
    return first, tl.load(base + count, mask=at < count, other=0)


@triton.jit
def tile_of_scores(x, row, head, begin, start, queries, keys, heads, M: tl.constexpr, N: tl.constexpr):
    """Return the addresses of scores [M, N] in a tensor [g, n, s, t], and which are inside."""
    base = x + ((row * heads + head).to(tl.int64) * queries + begin) * keys + start
    query, key = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    return base + query * keys + key, (begin + query < queries) & (start + key < keys)


@triton.jit
def tile_scores(
    q, k, row, head, begin, start, first, end, bias, queries, keys, heads, biases, scale,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the scores [M, N] of queries from `begin` and keys from `start`, HIDDEN where a query sees no key."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
    if bias is not None:
        at, inside = tile_of_scores(bias, row % biases, head, begin, start, queries, keys, heads, M, N)
        scores += tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2_E
    key = start + tl.arange(0, N)[None, :]
    return tl.where((key >= first[:, None]) & (key < end[:, None]), scores, HIDDEN)


@triton.jit
def kept(draw, number, begin, start, queries, keys, limit, M: tl.constexpr, N: tl.constexpr):
    """Return which probabilities [M, N] stay, by one hash for four keys; `number` is the head's in rows of all ranks.

    The hash's state is a sum of one number for each query and one for each word of four keys.
    """
    rows = (number.to(tl.int64) * queries + begin + tl.arange(0, M)) * ((keys + 3) // 4) + 1
    words = (start // 4 + tl.arange(0, N // 4)).to(tl.uint64) * GAMMA
    bits = mix((rows.to(tl.uint64) * GAMMA + tl.load(draw).to(tl.uint64))[:, None] + words[None, :])
    low, high = bits.to(tl.uint32), (bits >> 32).to(tl.uint32)
    # A draw is the upper half of 32 bits. The lower half decides no comparison with a limit of upper bits.
    draws = tl.join(tl.join(low << 16, high << 16), tl.join(low, high)).to(tl.int32, bitcast=True)
    return tl.reshape(draws >= limit, [M, N])


@triton.jit
def score_gradients(
    q, k, v, upstream, row, head, begin, start, first, end, bias, draw, log_sum, delta, queries, keys, heads, biases,
    scale, first_head, num_heads, limit, factor, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the probabilities [M, N] that made the context, and the gradients of the scores."""
    scores = tile_scores(q, k, row, head, begin, start, first, end, bias, queries, keys, heads, biases, scale, M, N)
    probability = tl.exp2(scores - log_sum[:, None])
    gradient = tl.dot(upstream, tl.trans(v), input_precision="ieee")
    used = probability
    if draw is not None:
        keep = kept(draw, row * num_heads + first_head + head, begin, start, queries, keys, limit, M, N)
        used = tl.where(keep, probability * factor, 0.0)
        gradient = tl.where(keep, gradient * factor, 0.0)
    return used, probability * (gradient - delta[:, None])


@triton.jit
def context_kernel(
    query, key, value, spans, bias, draw, context, log_sums, queries, keys, heads, biases, query_stride, key_stride,
    value_stride, scale, first_head, num_heads, limit, factor, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Attend M queries of a head, and keep the logarithms of their sums."""
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    begin = tl.program_id(0) * M
    at = begin + tl.arange(0, M)
    q = load_tile(query, row, head, begin, queries, query_stride, M, D)
    first, end = load_span(spans, row, at, queries, keys)
    largest = tl.full([M], HIDDEN, tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D], tl.float32)
    for start in range(tl.min(first, 0) // N * N, tl.max(end, 0), N):
        k = load_tile(key, row, head, start, keys, key_stride, N, D)
        v = load_tile(value, row, head, start, keys, value_stride, N, D)
        scores = tile_scores(q, k, row, head, begin, start, first, end, bias, queries, keys, heads, biases, scale, M, N)
        # Keys that are hidden before the first that is seen count as 1, until a seen one multiplies them by 0.
        best = tl.maximum(largest, tl.max(scores, 1))
        probability, less = tl.exp2(scores - best[:, None]), tl.exp2(largest - best)
        total = total * less + tl.sum(probability, 1)
        if draw is not None:
            keep = kept(draw, row * num_heads + first_head + head, begin, start, queries, keys, limit, M, N)
            probability = tl.where(keep, probability * factor, 0.0)
        sums = tl.dot(probability.to(v.dtype), v, sums * less[:, None], input_precision="ieee")
        largest = best
    store_tile(context, sums / total[:, None], row, head, begin, queries, heads * D, M, D)
    tl.store(log_sums + tl.program_id(1) * queries + at, largest + tl.log2(total), mask=at < queries)


@triton.jit
def query_kernel(
    context, gradient, query, key, value, spans, bias, draw, log_sums, deltas, query_gradient, queries, keys, heads,
    biases, query_stride, key_stride, value_stride, scale, first_head, num_heads, limit, factor,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of M queries, and for the other kernels the product of context and gradient of each."""
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    begin = tl.program_id(0) * M
    at = begin + tl.arange(0, M)
    upstream = load_tile(gradient, row, head, begin, queries, heads * D, M, D)
    made = load_tile(context, row, head, begin, queries, heads * D, M, D)
    delta = tl.sum(upstream.to(tl.float32) * made.to(tl.float32), 1)
    statistic = tl.program_id(1) * queries + at
    tl.store(deltas + statistic, delta, mask=at < queries)
    log_sum = tl.load(log_sums + statistic, mask=at < queries, other=0.0)
    q = load_tile(query, row, head, begin, queries, query_stride, M, D)
    first, end = load_span(spans, row, at, queries, keys)
    sums = tl.zeros([M, D], tl.float32)
    for start in range(tl.min(first, 0) // N * N, tl.max(end, 0), N):
        k = load_tile(key, row, head, start, keys, key_stride, N, D)
        v = load_tile(value, row, head, start, keys, value_stride, N, D)
        _, of_scores = score_gradients(
            q, k, v, upstream, row, head, begin, start, first, end, bias, draw, log_sum, delta, queries, keys, heads,
            biases, scale, first_head, num_heads, limit, factor, M, N,
        )  # fmt: skip
        sums = tl.dot(of_scores.to(k.dtype), k, sums, input_precision="ieee")
    store_tile(query_gradient, sums * scale, row, head, begin, queries, heads * D, M, D)


@triton.jit
def key_value_kernel(
    gradient, query, key, value, spans, key_spans, bias, draw, log_sums, deltas, key_gradient, value_gradient, queries,
    keys, heads, biases, query_stride, key_stride, value_stride, scale, first_head, num_heads, limit, factor,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of N keys and values of a head."""
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    start = tl.program_id(0) * N
    k = load_tile(key, row, head, start, keys, key_stride, N, D)
    v = load_tile(value, row, head, start, keys, value_stride, N, D)
    seen_from, seen_to = load_span(key_spans, row, start + tl.arange(0, N), keys, queries)
    of_keys = tl.zeros([N, D], tl.float32)
    of_values = tl.zeros([N, D], tl.float32)
    for begin in range(tl.min(seen_from, 0) // M * M, tl.max(seen_to, 0), M):
        at = begin + tl.arange(0, M)
        q = load_tile(query, row, head, begin, queries, query_stride, M, D)
        upstream = load_tile(gradient, row, head, begin, queries, heads * D, M, D)
        first, end = load_span(spans, row, at, queries, keys)
        statistic = tl.program_id(1) * queries + at
        log_sum = tl.load(log_sums + statistic, mask=at < queries, other=0.0)
        delta = tl.load(deltas + statistic, mask=at < queries, other=0.0)
        used, of_scores = score_gradients(
            q, k, v, upstream, row, head, begin, start, first, end, bias, draw, log_sum, delta, queries, keys, heads,
            biases, scale, first_head, num_heads, limit, factor, M, N,
        )  # fmt: skip
        of_values = tl.dot(tl.trans(used.to(upstream.dtype)), upstream, of_values, input_precision="ieee")
        of_keys = tl.dot(tl.trans(of_scores.to(q.dtype)), q, of_keys, input_precision="ieee")
    store_tile(key_gradient, of_keys * scale, row, head, start, keys, heads * D, N, D)
    store_tile(value_gradient, of_values, row, head, start, keys, heads * D, N, D)


@triton.jit
def bias_kernel(
    gradient, query, key, value, spans, bias, draw, log_sums, deltas, bias_gradient, rows, queries, keys, heads, biases,
    query_stride, key_stride, value_stride, scale, first_head, num_heads, limit, factor,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of M x N scores of a head over the rows that share their bias, one row after the other."""
    of, head = tl.program_id(2) // heads, tl.program_id(2) % heads
    begin = tl.program_id(0) * M
    at = begin + tl.arange(0, M)
    start = tl.program_id(1) * N
    sums = tl.zeros([M, N], tl.float32)
    for row in range(of, rows, biases):
        first, end = load_span(spans, row, at, queries, keys)
        if (tl.min(first, 0) < start + N) & (tl.max(end, 0) > start):
            q = load_tile(query, row, head, begin, queries, query_stride, M, D)
            upstream = load_tile(gradient, row, head, begin, queries, heads * D, M, D)
            k = load_tile(key, row, head, start, keys, key_stride, N, D)
            v = load_tile(value, row, head, start, keys, value_stride, N, D)
            statistic = (row * heads + head) * queries + at
            log_sum = tl.load(log_sums + statistic, mask=at < queries, other=0.0)
            delta = tl.load(deltas + statistic, mask=at < queries, other=0.0)
            _, of_scores = score_gradients(
                q, k, v, upstream, row, head, begin, start, first, end, bias, draw, log_sum, delta, queries, keys,
                heads, biases, scale, first_head, num_heads, limit, factor, M, N,
            )  # fmt: skip
            sums += of_scores
    at, inside = tile_of_scores(bias_gradient, of, head, begin, start, queries, keys, heads, M, N)
    tl.store(at, sums.to(bias_gradient.dtype.element_ty), mask=inside)


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
