"""Compiled loops for CPUs: softmax of attention scores, its gradient, dropout by key, and sums of gradients.

torch reads and writes memory once for each operation, and draws its dropout on one thread. These loops read and write
each number once, in the cache. bf16 arrays are uint16 here, computed in fp32. The hash is that of kernels/dropout.py.

Shape letters: r query rows of a tile (its heads times its queries), k keys of the tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from os import getpid
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray
from torch import Tensor

from ctxlm_ds.data.numba_random import GAMMA, compiled, inlined, mix

HALF = 1 << 15
"""Half of a lane's values (kernels/dropout.py)."""
SMALLEST_PART = 1 << 16
"""Numbers for which a further thread pays."""
WORDS = 512
"""Words that are hashed together; with their elements they fit the fastest cache."""
LOG2_E, LEAST_EXPONENT = np.float32(math.log2(math.e)), np.float32(-126.0)
C1, C2, C3, C4, C5, C6, C7 = (np.float32(math.log(2) ** power / math.factorial(power)) for power in range(1, 8))
"""Series of 2^x, which has an error of 5e-9 for |x| <= 1/2."""
# Sums may be reordered, which vectorizes them; NaN and infinity stay what they are.
fast = partial(compiled, fastmath={"reassoc", "nsz", "contract", "arcp"})


class Tile(NamedTuple):
    """Queries of some heads that see one range of keys."""

    first_head: int
    """Number of the first of the tile's heads, over all rows: row * heads + head."""
    queries: tuple[int, int]
    """First place of the queries in their row, and the place after the last."""
    keys: tuple[int, int]
    left: int
    """Most places before its own that a query sees."""
    right: int
    """Most places after its own."""
    offset: int
    """Place of its probabilities among those that are stored of a head."""
    stored_head: int
    """Number of the first of its heads among those that are stored."""


class Draw(NamedTuple):
    """Dropout of probabilities [b, n, s, t]; the words of each query begin at a word of four lanes."""

    threshold: int
    """Lanes below it are dropped; 0 drops nothing."""
    key: np.uint64
    heads: int
    """n of this rank."""
    first_head: int
    all_heads: int
    """n of all ranks."""
    rows: int
    """s"""
    words: int
    """Words of a query, ceil(t / 4)."""


def array_of(x: Tensor) -> NDArray[Any]:
    """Return a contiguous tensor's memory; bf16 as uint16."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).detach().numpy()


def in_threads(count: int, numbers: int, work: Callable[[int, int], None]) -> None:
    """Call work(begin, end) for parts of 0..count-1, which are `numbers` numbers, on torch's number of threads."""
    threads = torch.get_num_threads()
    parts = max(1, min(threads, numbers // SMALLEST_PART, count))
    ends = [count * part // parts for part in range(parts + 1)]
    others = [_pool(getpid(), threads - 1).submit(work, *ends[part : part + 2]) for part in range(1, parts)]
    work(0, ends[1])
    for other in others:
        other.result()


@lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return the threads of a process; threads do not survive a fork."""
    return ThreadPoolExecutor(max(1, threads), "cpu-loops")


def _bit_cast(source: Any, target: Any, code: ir.Type) -> Any:
    """Return a function of compiled code that reads the bits of one type as another."""

    @intrinsic
    def cast(context: Any, x: Any) -> Any:
        return target(source), lambda context, builder, signature, arguments: builder.bitcast(arguments[0], code)

    return cast


_as_float = _bit_cast(types.uint32, types.float32, ir.FloatType())
_as_bits = _bit_cast(types.float32, types.uint32, ir.IntType(32))


def _by_type(choose: Any) -> Any:
    """Make a function of compiled code from one that returns the code for the types of its arguments."""

    def of_compiled_code(*arguments: Any) -> Any: ...

    overload(of_compiled_code, strict=False)(choose)
    return of_compiled_code


@_by_type
def _read(x: Any) -> Any:
    """Return an element of an array as a number to compute with."""
    if x == types.uint16:
        return lambda x: _as_float(np.uint32(x) << np.uint32(16))
    return lambda x: x


@_by_type
def _like(x: Any, element: Any) -> Any:
    """Return a number as an element of an array, rounded to the nearest even one."""
    if element != types.uint16:
        return lambda x, element: x

    def rounded(x: Any, element: Any) -> Any:
        bits = _as_bits(x)
        even = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.uint16(0x7FC0) if np.isnan(x) else np.uint16(even)

    return rounded


@_by_type
def _ordered(x: Any) -> Any:
    """Return an element as an integer in the same order; vectors have a maximum of integers only."""
    if x == types.uint16:
        return lambda x: np.int32(np.int16(x)) ^ ((np.int32(np.int16(x)) >> np.int32(15)) & np.int32(0x7FFF))
    if x == types.float32:
        return lambda x: np.int32(_as_bits(x)) ^ ((np.int32(_as_bits(x)) >> np.int32(31)) & np.int32(0x7FFFFFFF))
    return lambda x: x


@_by_type
def _unordered(place: Any, element: Any) -> Any:
    """Return the element of which `place` is the integer."""
    if element == types.uint16:
        return lambda place, element: np.uint16(place ^ ((place >> np.int32(15)) & np.int32(0x7FFF)))
    if element == types.float32:
        return lambda place, element: _as_float(np.uint32(place ^ ((place >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    return lambda place, element: place


@_by_type
def _numbers_of(row: Any) -> Any:
    """Return an array of the type in which a row's elements are computed."""
    if row.dtype == types.uint16:
        return lambda row: np.empty(len(row), np.float32)
    return lambda row: np.empty_like(row)


@_by_type
def _exponential(x: Any) -> Any:
    """Return e^x for x <= 0."""
    if x != types.float32:
        return lambda x: math.exp(x)

    def power_of_two(x: Any) -> Any:
        exponent = x * LOG2_E
        exponent = LEAST_EXPONENT if exponent < LEAST_EXPONENT else exponent
        whole = np.int32(exponent - np.float32(0.5))
        y = exponent - np.float32(whole)
        series = ((C7 * y + C6) * y + C5) * y + C4
        series = (((series * y + C3) * y + C2) * y + C1) * y + np.float32(1.0)
        return series * _as_float(np.uint32(whole + np.int32(127)) << np.uint32(23))

    return power_of_two


@inlined
def _seen(tile: Tile, query: int) -> tuple[int, int]:
    """Return the columns of the tile that a query (its place in the row) sees."""
    first, end = tile.keys
    return max(0, query - tile.left - first), min(end - first, query + tile.right + 1 - first)


@inlined
def _draw_row(draw: Draw, tile: Tile, head: int, query: int, words: Any) -> None:
    """Hash the words that hold the lanes of the tile's keys."""
    number = (head // draw.heads) * draw.all_heads + draw.first_head + head % draw.heads
    first = (number * draw.rows + query) * draw.words + tile.keys[0] // 4
    state = draw.key + (np.uint64(first) + np.uint64(1)) * GAMMA
    for word in range(len(words)):
        words[word] = mix(state + np.uint64(word) * GAMMA)


@inlined
def _raise(values: Any, scale: Any, powers: Any) -> tuple[Any, Any]:
    """Write e^((value - largest) * scale) of each value; return the largest value and the sum."""
    highest = _ordered(values[0])
    for j in range(len(values)):
        place = _ordered(values[j])
        highest = place if place > highest else highest
    largest, total = _read(_unordered(highest, values[0])), scale - scale
    for j in range(len(values)):
        exponential = _exponential((_read(values[j]) - largest) * scale)
        powers[j] = exponential
        total += exponential
    return largest, total


@inlined
def _weigh(
    visible: Any, scale: Any, limits: Any, draw: Draw, first: int, head: int, query: int, powers: Any
) -> tuple[Any, Any]:
    """Do the same with values times the scale plus a bias, and 0 for keys of higher ranks; `first` is the first key."""
    (distances, ranks), row = limits, head // draw.heads
    zero, one, count, rank = scale - scale, scale / scale, len(visible), 0
    for j in range(count):
        powers[j] = _read(visible[j]) * scale
    if len(distances) > 0:
        begin = draw.rows - 1 - query + first
        bias = distances[head % draw.heads, begin : begin + count]
        for j in range(count):
            powers[j] += _read(bias[j])
    if len(ranks) > 0:
        # A position of padding sees some key.
        seen = ranks[row, first : first + count]
        rank = max(ranks[row, query], seen.min())
        for j in range(count):
            powers[j] = powers[j] if seen[j] <= rank else -one / zero
    largest, total = _raise(powers, one, powers)
    if len(ranks) > 0:
        seen = ranks[row, first : first + count]
        for j in range(count):
            powers[j] = powers[j] if seen[j] <= rank else zero
    return largest, total


@fast
def softmax_loop(
    scores: Any, stored: Any, scales: Any, tile: Tile, draw: Draw, limits: Any, begin: int, end: int
) -> None:
    """Replace scores by probabilities after dropout; store those before it, negative if dropped.

    Args:
        scores: [r, k], products of queries and keys.
        stored: [heads over all rows, ...]; empty to store none.
        scales: factor of the products, positive, and factor of what is kept, both of the type to compute in.
        tile: queries and keys.
        draw: the dropout.
        limits: distances [n, 2 s - 1], a bias by the place of the key minus that of the query, and ranks [b, s], of
            which a query sees no higher ones; empty without.
        begin: first of the r rows to compute.
        end: row after the last.
    """
    scale, factor = scales
    first_query, end_query = tile.queries
    num_queries, width = end_query - first_query, tile.keys[1] - tile.keys[0]
    shift, lowest_lane = tile.keys[0] % 4, draw.threshold - HALF
    words = np.empty((width + shift + 3) // 4, np.uint64)
    lanes = words.view(np.int16)[shift : shift + width]
    exponentials = _numbers_of(scores[0])
    zero, one = scale - scale, scale / scale
    for r in range(begin, end):
        head, number = tile.first_head + r // num_queries, r % num_queries
        low, high = _seen(tile, first_query + number)
        row = scores[r]
        # Loops from 0 to a length are vectorized; other bounds could be negative indices.
        visible, powers = row[low:high], exponentials[low:high]
        if len(limits[0]) > 0 or len(limits[1]) > 0:
            first = tile.keys[0] + low
            largest, total = _weigh(visible, scale, limits, draw, first, head, first_query + number, powers)
        else:
            largest, total = _raise(visible, scale, powers)
        # NaN if the largest score is not finite.
        inverse = one / total + (largest - largest)
        exponentials[:low] = zero
        exponentials[high:] = zero
        if draw.threshold > 0:
            _draw_row(draw, tile, head, first_query + number, words)
            if len(stored) > 0:
                place = tile.offset + number * width
                kept = stored[tile.stored_head + r // num_queries, place : place + width]
                for j in range(width):
                    probability = exponentials[j] * inverse
                    kept[j] = _like(probability if lanes[j] >= lowest_lane else -probability, row[j])
            for j in range(width):
                probability = _read(_like(exponentials[j] * inverse, row[j])) * factor
                row[j] = _like(probability if lanes[j] >= lowest_lane else zero, row[j])
        else:
            for j in range(width):
                row[j] = _like(exponentials[j] * inverse, row[j])
            if len(stored) > 0:
                place = tile.offset + number * width
                kept = stored[tile.stored_head + r // num_queries, place : place + width]
                for j in range(width):
                    kept[j] = row[j]


@fast
def softmax_gradient_loop(
    stored: Any, gradients: Any, dropped: Any, scales: Any, tile: Tile, begin: int, end: int
) -> None:
    """Replace the gradients of probabilities after dropout by those of the products, and write the probabilities.

    `gradients` and `dropped`, which gets the probabilities after dropout, are [r, k]; see softmax_loop for the others.
    """
    scale, factor = scales
    num_queries, width = tile.queries[1] - tile.queries[0], tile.keys[1] - tile.keys[0]
    zero, one, scaled = scale - scale, scale / scale, scale * factor
    for r in range(begin, end):
        first = tile.offset + r % num_queries * width
        probabilities = stored[tile.stored_head + r // num_queries, first : first + width]
        gradient, after = gradients[r], dropped[r]
        total = zero
        for j in range(width):
            probability = _read(probabilities[j])
            total += (probability if probability > zero else zero) * _read(gradient[j])
        for j in range(width):
            probability = _read(probabilities[j])
            # The factor comes last, so that the difference is exactly 0 if one key has all of the attention.
            kept = one if probability > zero else zero
            change = abs(probability) * (kept * _read(gradient[j]) - total) * scaled
            gradient[j] = _like(change, gradient[j])
            after[j] = _like(kept * probability * factor, gradient[j])


@fast
def distance_loop(gradients: Any, sums: Any, scale: Any, tile: Tile, heads: int, begin: int, end: int) -> None:
    """Add the gradients of products [r, k] to those of the bias by distance, fp64 [n, 2 s - 1], of some of n heads."""
    num_queries, middle = tile.queries[1] - tile.queries[0], (sums.shape[1] - 1) // 2
    for r in range(len(gradients)):
        head = (tile.first_head + r // num_queries) % heads
        if begin <= head < end:
            first = tile.keys[0] - tile.queries[0] - r % num_queries + middle
            row, target = gradients[r], sums[head, first : first + gradients.shape[1]]
            for j in range(len(row)):
                target[j] += _read(row[j]) / scale


@compiled
def dropout_loop(
    x: Any, out: Any, factor: Any, lowest_lane: int, key: np.uint64, first: int, begin: int, end: int
) -> None:
    """Multiply the elements that are kept by the factor, of the type to compute in, and set the others to 0.

    `x` and `out` are flat, and `first` is the place of x's first element in the complete tensor (keyed_dropout). Lanes
    below `lowest_lane` are dropped. The loop computes the elements from `begin` to before `end`.
    """
    words = np.empty(WORDS, np.uint64)
    all_lanes = words.view(np.int16)
    zero = factor - factor
    for start in range(begin, end, 4 * (WORDS - 1)):
        count = min(end - start, 4 * (WORDS - 1))
        shift = (first + start) % 4
        state = key + np.uint64((first + start) // 4 + 1) * GAMMA
        for word in range((count + shift + 3) // 4):
            words[word] = mix(state + np.uint64(word) * GAMMA)
        lanes = all_lanes[shift : shift + count]
        source, target = x[start : start + count], out[start : start + count]
        for j in range(count):
            target[j] = _like(_read(source[j]) * factor if lanes[j] >= lowest_lane else zero, source[j])


@compiled
def sum_loop(out: Any, x: Any, addend: Any, begin: int, end: int) -> None:
    """Write the sum of two flat arrays; `out`, fp32, may be one of them, the others may be bf16."""
    target, source, other = out[begin:end], x[begin:end], addend[begin:end]
    for j in range(len(target)):
        target[j] = _read(source[j]) + _read(other[j])
