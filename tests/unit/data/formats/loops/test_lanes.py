"""Windows of an epoch's stream, at any position, beside the units of the order joined in plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from ctxlm_ds.data.formats.base import SequenceTemplate
from ctxlm_ds.data.formats.loops.lanes import PURPOSE, UnitOrder, Units, count_positions, order_units, read_window
from ctxlm_ds.data.index.sentence_table import UNALIGNED
from ctxlm_ds.data.numba_random import Permutation

TEMPLATE = SequenceTemplate(cls_id=1, sep_id=2, pad_id=0, double_separator=False, vocab_size=5000)
LENGTHS = np.random.default_rng(3).integers(0, 9, size=500)
TOKENS = np.arange(10, 10 + LENGTHS.sum(), dtype=np.int32)
FIRST, AFTER = 40, 300


def units_of(mark: int, shift: int) -> Units:
    starts = ((np.cumsum(LENGTHS) - LENGTHS) << shift).view(UNALIGNED)
    starts.flags.writeable = False
    return Units(starts, shift, len(TOKENS), mark)


def window(
    units: Units, order: UnitOrder, begin: int, size: int, backward: bool
) -> tuple[list[int], list[bool]] | None:
    ids, special = np.zeros(size, dtype=np.int32), np.ones(size, dtype=np.bool_)
    is_intact = read_window(ids, special, TOKENS, TEMPLATE, units, order, begin, backward)
    return (ids.tolist(), special.tolist()) if is_intact else None


@pytest.mark.parametrize(("mark", "shift", "backward"), [(0, 0, False), (0, 2, True), (1, 1, False), (1, 0, True)])
def test_every_window_is_that_of_the_joined_units(mark: int, shift: int, backward: bool) -> None:
    units = units_of(mark, shift)
    order = order_units(units, FIRST, AFTER, 7, 1)
    size = AFTER - FIRST
    # The same keys as order_units', of which Permutation adds the size.
    keys = Permutation(size, 7)
    keys._round_keys = order.round_keys
    assert len(set(keys[np.arange(size)].tolist())) == size
    starts = np.cumsum(LENGTHS) - LENGTHS
    stream: list[tuple[int, bool]] = []
    for unit in (keys[np.arange(size)] + FIRST).tolist():
        tokens = TOKENS[starts[unit] : starts[unit] + LENGTHS[unit]].tolist()[:: -1 if backward else 1]
        if tokens:
            stream += [(2 if backward else 1, True)] * mark + [(token, False) for token in tokens]
    assert len(stream) == count_positions(units, FIRST, AFTER) == order.sums[-1]
    for begin in [*range(0, len(stream) - 30, 7), len(stream) - 30]:
        for length in (1, 2, 30):
            expected = stream[begin : begin + length]
            ids, special = (list(column) for column in zip(*expected, strict=True))
            assert window(units, order, begin, length, backward) == (ids, special)
    assert window(units, order, len(stream) - 1, 2, backward) is None
    assert window(units, order, -1, 2, backward) is None


def test_a_token_outside_of_the_vocabulary_is_damage() -> None:
    units = units_of(0, 0)
    order = order_units(units, FIRST, AFTER, 7, 1)
    ids, special = np.zeros(int(order.sums[-1]), dtype=np.int32), np.ones(int(order.sums[-1]), dtype=np.bool_)
    small = TEMPLATE._replace(vocab_size=int(TOKENS[LENGTHS[:AFTER].sum() - 1]))
    assert read_window(ids, special, TOKENS, small._replace(vocab_size=small.vocab_size + 1), units, order, 0, False)
    assert not read_window(ids, special, TOKENS, small, units, order, 0, False)


def test_keys_decide_the_order() -> None:
    units = units_of(0, 0)
    one, same, other = (order_units(units, FIRST, AFTER, 7, key) for key in (1, 1, 2))
    read = [window(units, order, 0, 100, False) for order in (one, same, other)]
    assert read[0] == read[1] != read[2] and PURPOSE == "lanes"
