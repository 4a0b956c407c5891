"""Damage in a window of an epoch's stream; test_lanes.py of the formats has what rows hold."""

from __future__ import annotations

import numpy as np

from ctxlm_ds.data.formats.base import SequenceTemplate
from ctxlm_ds.data.formats.loops.lanes import Units, order_units, read_window
from ctxlm_ds.data.index.sentence_table import UNALIGNED

TEMPLATE = SequenceTemplate(cls_id=1, sep_id=2, pad_id=0, double_separator=False, vocab_size=5000)
LENGTHS = np.random.default_rng(3).integers(0, 9, size=500)
TOKENS = np.arange(10, 10 + LENGTHS.sum(), dtype=np.int32)
FIRST, AFTER = 40, 300


def test_a_place_or_token_outside_is_damage() -> None:
    starts = (np.cumsum(LENGTHS) - LENGTHS).view(UNALIGNED)
    starts.flags.writeable = False
    units = Units(starts, 0, len(TOKENS), 0)
    order = order_units(units, FIRST, AFTER, 7, 1)
    ids, special = np.zeros(int(order.sums[-1]), dtype=np.int32), np.ones(int(order.sums[-1]), dtype=np.bool_)
    small = TEMPLATE._replace(vocab_size=int(TOKENS[LENGTHS[:AFTER].sum() - 1]))
    assert read_window(ids, special, TOKENS, small._replace(vocab_size=small.vocab_size + 1), units, order, 0, False)
    assert not read_window(ids, special, TOKENS, small, units, order, 0, False)
    for begin in (-1, 1):
        assert not read_window(ids, special, TOKENS, TEMPLATE, units, order, begin, False)
