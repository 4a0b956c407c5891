"""Attention on CPUs by products of matrices in the activations' type, with one compiled loop between them and no mask.

Queries that see one range of keys are a tile. The scores of as many heads as fit the cache become probabilities in
kernels/cpu_loops.py, which also drops some by key. Memory and work are those of the tiles, not s times t. Of long rows
no probabilities are stored: the backward pass computes them again, so that memory is linear in s.

Shape letters as in kernels/attention_spec.py; c heads of some rows, q queries and k keys of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ctxlm_ds.errors import KernelError
from ctxlm_ds.kernels.attention_spec import AttentionCall, AttentionKernel, AttentionSpec, Sequences, default_keys, once
from ctxlm_ds.kernels.dropout import LANES_PER_WORD, threshold_and_factor
from ctxlm_ds.kernels.implementation import Need, tag_compiled_code

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ctxlm_ds.kernels.cpu_loops import Draw, Tile

CACHED_SCORES = 1 << 19
"""Scores that are computed together."""
TILE_QUERIES = 256
"""Queries of a tile if keys are limited by place, or the row is long."""
LONG_ROW = 1024
"""Positions above which a row is long."""
STORED_SCORES = LONG_ROW**2
"""Scores of a head above which probabilities are not stored for the backward pass."""
UNLIMITED = 1 << 40
NO_RANKS = np.empty((0, 0), np.int64)
tag_compiled_code()

Range = tuple[int, int]


class Span(NamedTuple):
    """Rows whose queries see keys of one range; each range is the first place and the place after the last."""

    rows: Range
    queries: Range
    keys: Range
    by_rank: bool
    """True if some query does not see a key because of their ranks."""
    offset: int
    """Place of its probabilities among those of a head."""

    @property
    def scores(self) -> int:
        return (self.queries[1] - self.queries[0]) * (self.keys[1] - self.keys[0])


def spans_of(spec: AttentionSpec, sequences: Sequences, num_keys: int) -> list[Span]:
    """Return the spans that cover every query once; rows of the same lengths are one span."""
    own = _runs(sequences.ids)
    keys = own if sequences.key_ids is None else _runs(sequences.key_ids)
    groups: list[tuple[list[tuple[Range, Range, bool]], Range]] = []
    for row, (queries, seen) in enumerate(zip(own, keys, strict=True)):
        ranks, first = None if sequences.ranks is None else sequences.ranks[row].numpy(), row
        parts = [(some, *_by_rank(ranks, some, places)) for some, places in _parts(spec, queries, seen, num_keys)]
        if groups and groups[-1][0] == parts:
            first = groups.pop()[1][0]
        groups.append((parts, (first, row + 1)))
    spans: list[Span] = []
    for parts, rows in groups:
        offset = 0
        for part in parts:
            spans.append(Span(rows, *part, offset))
            offset += spans[-1].scores
    return spans


def _runs(ids: Tensor) -> list[list[tuple[int, int, int]]]:
    """Return (id, begin, end) of the runs of equal ids in each row of ids [b, s]."""
    runs = []
    for row in ids:
        numbers, counts = row.unique_consecutive(return_counts=True)
        ends = counts.cumsum(0).tolist()
        runs.append(list(zip(numbers.tolist(), [0, *ends[:-1]], ends, strict=True)))
    return runs


def _parts(
    spec: AttentionSpec, queries: list[tuple[int, int, int]], keys: list[tuple[int, int, int]], num_keys: int
) -> Iterator[tuple[Range, Range]]:
    """Yield the ranges of queries and of the keys that they see in one row."""
    if not spec.shares_rows and not spec.ordered:
        end = queries[-1][2]
        step = TILE_QUERIES if end > LONG_ROW else end
        yield from (((start, min(end, start + step)), (0, keys[0][2])) for start in range(0, end, step))
        return
    left, right = limits(spec)
    places = {number: (begin, end) for number, begin, end in keys}
    for number, begin, end in queries:
        first, last = places.get(number, (0, num_keys))
        step = TILE_QUERIES if spec.ordered or end - begin > LONG_ROW else end - begin
        for start in range(begin, end, step):
            stop = min(end, start + step)
            yield (start, stop), (max(first, start - left), min(last, stop + right))


def _by_rank(ranks: NDArray[np.integer] | None, queries: Range, keys: Range) -> tuple[Range, bool]:
    """Return the range of the keys that some query sees, and whether another does not see all of them.

    A query of padding sees the lowest rank.
    """
    if ranks is None:
        return keys, False
    of_keys = ranks[slice(*keys)]
    of_queries = np.maximum(ranks[slice(*queries)], of_keys.min())
    places = np.flatnonzero(of_keys <= of_queries.max())
    first, end = int(places[0]), int(places[-1]) + 1
    return (keys[0] + first, keys[0] + end), bool(of_keys[first:end].max() > of_queries.min())


def needs_square_mask(spec: AttentionSpec) -> bool:
    """Return whether torch's attention needs a mask of s times t: all but plain rows and causal rows of one text."""
    return spec.shares_rows or spec.window is not None or spec.ranked or spec.bias


def limits(spec: AttentionSpec) -> tuple[int, int]:
    """Return the most places before and after its own that a query sees."""
    window = UNLIMITED if spec.window is None else spec.window
    return window, 0 if spec.causal else window


def stored_scores(spec: AttentionSpec, num_queries: int, num_keys: int) -> int:
    """Return a bound of the scores of a head, s times the keys that a span sees at most."""
    return num_queries * min(num_keys, TILE_QUERIES + sum(limits(spec)) if spec.ordered else num_keys)


def _tiles(
    spec: AttentionSpec, places: list[Tensor], num_keys: int, heads: int, arrays: tuple[Any, Any]
) -> Iterator[tuple[Tile, tuple[Any, Any], slice, slice, slice]]:
    """Yield tiles that fit the cache, with bias and ranks, and slices of the heads of all rows, of queries and of keys.

    Their spans are found once for all layers of a micro-batch.
    """
    from ctxlm_ds.kernels.cpu_loops import Tile

    others = {"key_ids": places[1]} if spec.cross else {"ranks": places[-1]} if spec.ranked else {}
    sequences, (left, right) = Sequences(places[0], places[0], **others), limits(spec)
    for span in once(sequences, "spans", spec, lambda: spans_of(spec, sequences, num_keys)):
        step, end = max(1, CACHED_SCORES // span.scores), span.rows[1] * heads
        for first in range(span.rows[0] * heads, end, step):
            tile = Tile(first, span.queries, span.keys, left, right, span.offset, first)
            read = arrays if span.by_rank else (arrays[0], NO_RANKS)
            yield tile, read, slice(first, min(first + step, end)), slice(*span.queries), slice(*span.keys)


def _scales(numbers: list[float], dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the scale of the scores and the factor of what dropout keeps, of the type to compute in."""
    number = np.float64 if dtype == torch.float64 else np.float32
    return number(numbers[0]), number(threshold_and_factor(numbers[1])[1])


def _draw(query: Tensor, key: Tensor, draw_key: Tensor, kind: list[int], numbers: list[float]) -> Draw:
    """Return the dropout of the probabilities of query [b, n, s, d] and key [b, n, t, d]."""
    from ctxlm_ds.kernels.cpu_loops import Draw

    threshold, words = threshold_and_factor(numbers[1])[0], -(-key.shape[2] // LANES_PER_WORD)
    number = np.uint64(int(draw_key) % (1 << 64))
    return Draw(threshold, number, query.shape[1], kind[4], kind[5], query.shape[2], words)


@torch.library.custom_op("ctxlm_ds::attention", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distances: Tensor | None,
    places: list[Tensor],
    draw_key: Tensor,
    kind: list[int],
    numbers: list[float],
) -> list[Tensor]:
    """Return the context and the stored probabilities, as an operation that torch.compile does not look into.

    Args:
        query: [b, n, s, d].
        key: [b, n, t, d].
        value: [b, n, t, d].
        distances: of AttentionCall.
        places: ids of Sequences, of cross attention also key_ids, of ranked attention also ranks.
        draw_key: of ProbabilityKeys.
        kind: causal, shares_rows, cross, window (0 for none), first head, all heads, whether to store probabilities,
            ranked.
        numbers: scale of the scores, dropout.

    Returns:
        The context [b, n, s, d], and the probabilities of each span [b * n, scores of a head], negative if dropped;
        empty if none are stored.
    """
    from ctxlm_ds.kernels.cpu_loops import array_of, in_threads, softmax_loop

    draw = _draw(query, key, draw_key, kind, numbers)
    scales, stored, context = _scales(numbers, query.dtype), _storage(query, key, kind), torch.empty_like(query)
    q, k, v, out = (x.flatten(0, 1) for x in (query, key, value, context))
    probabilities, arrays = array_of(stored), _limits(distances, places, kind)
    for tile, limits, some, queries, seen in _tiles(_spec(kind), places, key.shape[2], query.shape[1], arrays):
        scores = torch.bmm(q[some, queries], k[some, seen].transpose(1, 2))
        table = array_of(scores.flatten(0, 1))
        in_threads(len(table), table.size, partial(softmax_loop, table, probabilities, scales, tile, draw, limits))
        out[some, queries] = torch.bmm(scores, v[some, seen])
    return [context, stored]


@torch.library.custom_op("ctxlm_ds::attention_backward", mutates_args=())
def _attention_backward(
    gradient: Tensor,
    inputs: list[Tensor],
    stored: Tensor,
    distances: Tensor | None,
    places: list[Tensor],
    draw_key: Tensor,
    kind: list[int],
    numbers: list[float],
) -> list[Tensor]:
    """Return the gradients of query, key and value [b, n, s or t, d], and of distances if there are some."""
    from ctxlm_ds.kernels.cpu_loops import array_of, distance_loop, in_threads, softmax_gradient_loop, softmax_loop

    query, key, value = inputs
    draw = _draw(query, key, draw_key, kind, numbers)
    spec, scales = _spec(kind), _scales(numbers, query.dtype)
    # Keys of several spans have several gradients, added up in fp32.
    overlaps = spec.ordered or spec.cross or query.shape[2] > LONG_ROW
    sums = torch.promote_types(query.dtype, torch.float32) if overlaps else query.dtype
    changes = [torch.empty_like(query), *(torch.zeros_like(x, dtype=sums) for x in (key, value))]
    q, k, v, g, dq, dk, dv = (x.flatten(0, 1) for x in (query, key, value, gradient.contiguous(), *changes))
    probabilities, arrays, heads = array_of(stored), _limits(distances, places, kind), query.shape[1]
    if distances is not None:
        changes.append(torch.zeros_like(distances, dtype=torch.float64))
    for tile, limits, some, queries, seen in _tiles(spec, places, key.shape[2], heads, arrays):
        upstream = g[some, queries]
        if stored.numel() == 0:
            scores = torch.bmm(q[some, queries], k[some, seen].transpose(1, 2))
            probabilities, tile = array_of(torch.empty_like(scores.flatten(1))), tile._replace(stored_head=0, offset=0)
            table = array_of(scores.flatten(0, 1))
            in_threads(len(table), table.size, partial(softmax_loop, table, probabilities, scales, tile, draw, limits))
        scores = torch.bmm(upstream, v[some, seen].transpose(1, 2))
        dropped = torch.empty_like(scores)
        tables = array_of(scores.flatten(0, 1)), array_of(dropped.flatten(0, 1))
        loop = partial(softmax_gradient_loop, probabilities, *tables, scales, tile)
        in_threads(len(tables[0]), tables[0].size, loop)
        if distances is not None:
            add = partial(distance_loop, tables[0], array_of(changes[3]), scales[0], tile, heads)
            in_threads(heads, tables[0].size, add)
        dq[some, queries] = torch.bmm(scores, k[some, seen])
        of_keys = torch.bmm(scores.transpose(1, 2), q[some, queries])
        of_values = torch.bmm(dropped.transpose(1, 2), upstream)
        if overlaps:
            dk[some, seen] += of_keys
            dv[some, seen] += of_values
        else:
            dk[some, seen], dv[some, seen] = of_keys, of_values
    return [change.to(query.dtype) for change in changes]


@_attention.register_fake
def _attention_shapes(
    query: Tensor, key: Tensor, value: Tensor, distances: Any, places: Any, draw_key: Any, kind: list[int], numbers: Any
) -> list[Tensor]:
    return [torch.empty_like(query), _storage(query, key, kind)]


@_attention_backward.register_fake
def _attention_backward_shapes(
    gradient: Tensor, inputs: list[Tensor], stored: Any, distances: Tensor | None, *others: Any
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (*inputs, distances) if x is not None]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, distances, places, draw_key, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, output[1], distances, draw_key, *places)


def _gradients(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    query, key, value, stored, distances, draw_key, *places = ctx.saved_tensors
    found: list[Tensor] = []
    if gradients[0] is not None:
        inputs = [query, key, value]
        found = _attention_backward(gradients[0], inputs, stored, distances, places, draw_key, *ctx.settings)
    return *found, *(None,) * (4 - len(found)), [None] * len(places), None, None, None


_attention.register_autograd(_gradients, setup_context=_remember)


@register_flop_formula(torch.ops.ctxlm_ds.attention)
def _flops(query: torch.Size, key: torch.Size, *others: Any, **named: Any) -> int:
    """Count the two products of every query and key, as for torch's attention."""
    return 4 * query.numel() * key[2]


def _spec(kind: list[int]) -> AttentionSpec:
    causal, shares_rows, cross, window = kind[:4]
    is_ranked = bool(kind[-1])
    return AttentionSpec(1, bool(causal), bool(shares_rows), window=window or None, cross=bool(cross), ranked=is_ranked)


def _limits(distances: Tensor | None, places: list[Tensor], kind: list[int]) -> tuple[Any, Any]:
    """Return the arrays `limits` of softmax_loop."""
    from ctxlm_ds.kernels.cpu_loops import array_of

    bias = np.empty((0, 0), np.float32) if distances is None else array_of(distances.contiguous())
    ranked = kind[-1]
    return bias, array_of(places[-1].contiguous()) if ranked else NO_RANKS


def _storage(query: Tensor, key: Tensor, kind: list[int]) -> Tensor:
    rows, heads, length, _ = query.shape
    return query.new_empty((rows * heads, stored_scores(_spec(kind), length, key.shape[2])) if kind[6] else (0, 0))


@dataclass(frozen=True)
class BmmAttention:
    """Products of matrices around a compiled softmax; dropout by key."""

    DRAWS_BY_KEY: ClassVar[bool] = True
    READS_DISTANCES: ClassVar[bool] = True
    spec: AttentionSpec
    in_float32: bool = False
    """Compute in float32 and round the result."""
    long_rows: AttentionKernel | None = None
    """Trains on rows whose probabilities would need much memory, if it needs neither them nor a mask of s times t."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        sequences, p, bias, keys, distances = call
        if bias is not None:
            raise KernelError("kernels.attention: `bmm` adds a bias by distance only, but a bias of pairs was given")
        dtype, group = query.dtype, query.shape[2] // key.shape[2]
        store = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        if stored_scores(self.spec, query.shape[1], key.shape[1]) > STORED_SCORES:
            if store and p == 0.0 and self.long_rows is not None and not needs_square_mask(self.spec):
                return self.long_rows(query, key, value, call)
            store = False
        if self.in_float32:
            query, key, value = query.float(), key.float(), value.float()
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if group > 1:
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        draw_key, *heads = keys or default_keys(query)
        scale = query.shape[-1] ** -0.5 if self.spec.scale is None else self.spec.scale
        spec = self.spec
        kind = [spec.causal, spec.shares_rows, spec.cross, spec.window or 0, *heads, store, spec.ranked]
        asked = sequences.ids, sequences.key_ids, sequences.ranks if spec.ranked else None
        places = [x for x in asked if x is not None]
        context = _attention(query, key, value, distances, places, draw_key, kind, [scale, p])[0]
        return context.transpose(1, 2).to(dtype)


def why_bmm_cannot_run(need: Need) -> str | None:
    """Return the reason, or None if `bmm` runs here."""
    if need.device_type != "cpu":
        return f"it needs a CPU, and this run is on {need.device_type}"
    if need.dtype not in (torch.bfloat16, torch.float32):
        return f"it computes in bf16 or fp32 only, and the precision is {need.dtype}"
    if need.spec.bias and not need.spec.by_distance:
        return "it adds a bias by distance only, and this model's attention has one of pairs of positions"
    if need.spec.scale is not None and need.spec.scale <= 0.0:
        return f"the scale of the scores must be positive, and it is {need.spec.scale}"
    return None


def suits_bmm(need: Need) -> bool:
    """Return True if `bmm` is faster than torch's attention."""
    return need.dtype == torch.bfloat16 or need.spec.dropout > 0.0 or need.spec.by_distance
