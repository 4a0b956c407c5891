"""Streams of units (documents or sentences) in an order of each epoch, read at any token.

An order is a keyed permutation of a dataset's units. One sum of 8 bytes per UNITS_A_SUM units counts the positions
before them. A binary search over the sums and a few units of the permutation find any window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.formats.base import SequenceTemplate
from ctxlm_ds.data.numba_random import FEISTEL_ROUNDS, compiled, hash_words, inlined, permute

UNITS_A_SUM = 32
PURPOSE = "lanes"


class Units(NamedTuple):
    """Token ranges of all documents or all sequences of a dataset, one after another."""

    starts: NDArray[Any]
    """[units] UNALIGNED, where each begins, in units of 2^-shift tokens."""
    shift: int
    stop: int
    """The token after the dataset's last."""
    mark: int
    """1 if a position before the tokens of a unit has its begin mark, else 0. An empty unit has no position."""


class UnitOrder(NamedTuple):
    """The order of units `first` to `first + size - 1` in one epoch."""

    first: int
    size: int
    half_bits: int
    round_keys: NDArray[np.uint64]
    sums: NDArray[np.int64]
    """[size / UNITS_A_SUM, rounded up, + 1] positions before every UNITS_A_SUM-th unit of the order, and all."""


@inlined
def positions_of(units: Units, unit: int) -> int:
    """Return the positions of a unit in the stream."""
    after = units.starts[unit + 1].value >> units.shift if unit + 1 < len(units.starts) else units.stop
    length = after - (units.starts[unit].value >> units.shift)
    return length + units.mark if length > 0 else 0


@compiled
def count_positions(units: Units, first: int, after: int) -> int:
    """Return the positions of units `first` to `after` - 1 in the stream of an epoch."""
    total = 0
    for unit in range(first, after):
        total += positions_of(units, unit)
    return total


@compiled
def _sum_positions(units: Units, order: UnitOrder) -> None:
    places = np.empty(UNITS_A_SUM, dtype=np.int64)
    total = 0
    for number in range(len(order.sums) - 1):
        order.sums[number] = total
        count = _units_at(order, number, places)
        for place in range(count):
            total += positions_of(units, places[place])
    order.sums[len(order.sums) - 1] = total


@compiled
def _units_at(order: UnitOrder, number: int, places: NDArray[np.int64]) -> int:
    """Write the units of a group of UNITS_A_SUM in their order; return how many the group has."""
    begin = number * UNITS_A_SUM
    count = min(UNITS_A_SUM, order.size - begin)
    for place in range(count):
        places[place] = begin + place
    permute(places[:count], order.size, order.half_bits, order.round_keys)
    for place in range(count):
        places[place] += order.first
    return count


def order_units(units: Units, first: int, after: int, *key: int | str) -> UnitOrder:
    """Return the order of units `first` to `after` - 1 under a key."""
    size = after - first
    half_bits = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    round_keys = hash_words(FEISTEL_ROUNDS, PURPOSE, *key)
    order = UnitOrder(first, size, half_bits, round_keys, np.zeros(-(-size // UNITS_A_SUM) + 1, dtype=np.int64))
    _sum_positions(units, order)
    return order


@compiled
def read_window(
    into: NDArray[np.int32],
    special: NDArray[np.bool_],
    tokens: NDArray[Any],
    template: SequenceTemplate,
    units: Units,
    order: UnitOrder,
    begin: int,
    backward: bool,
) -> bool:
    """Write the positions from `begin` of an epoch's stream; return False if it ends before or a token is damaged.

    `special` receives True at marks. The `cls_id` marks the beginning of a unit, or the `sep_id` if the tokens of each
    unit are read backward.
    """
    if begin < 0 or begin + len(into) > order.sums[-1]:
        return False
    group = np.searchsorted(order.sums, begin, side="right") - 1
    skip = begin - order.sums[group]
    mark = template.sep_id if backward else template.cls_id
    places = np.empty(UNITS_A_SUM, dtype=np.int64)
    filled = outside = 0
    while filled < len(into):
        for place in range(_units_at(order, group, places)):
            unit = places[place]
            size = positions_of(units, unit)
            if skip >= size:
                skip -= size
                continue
            start = (units.starts[unit].value >> units.shift) - units.mark
            for position in range(skip, min(size, skip + len(into) - filled)):
                special[filled] = position < units.mark
                if position < units.mark:
                    into[filled] = mark
                else:
                    place_of = start + size - 1 - (position - units.mark) if backward else start + position
                    token = int(tokens[place_of])
                    outside += token < 0 or token >= template.vocab_size
                    into[filled] = token
                filled += 1
            skip = 0
            if filled == len(into):
                break
        group += 1
    return outside == 0
