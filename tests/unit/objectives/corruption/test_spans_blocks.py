"""Masked spans beside MASS's algorithm, written down here with the same draws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ctxlm_ds.data.numba_random import below, stream, stream_key, uniform, word_at
from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.objectives.corruption.spans import SpanRules, mask_spans
from tests.ragged import Sample, samples_from

KEY, MASK, VOCABULARY = stream_key(1, "mask"), 4, 500
TEXT = np.arange(5, VOCABULARY, dtype=np.int32)


def samples_of(lengths: list[int]) -> list[Sample]:
    rng = np.random.default_rng(0)
    rows = [rng.integers(5, VOCABULARY, size=length).astype(np.int32) for length in lengths]
    return [Sample(row, np.zeros_like(row), np.zeros(len(row), dtype=np.bool_), NO_LABEL) for row in rows]


def corrupt(samples: list[Sample], rules: SpanRules) -> list[tuple[list[int], list[int]]]:
    flat = samples_from(samples)
    ids, masked = np.empty_like(flat.input_ids), np.empty(len(flat.input_ids), dtype=np.bool_)
    mask_spans(flat, KEY, rules, ids, masked)
    bounds = list(zip(flat.starts, flat.starts[1:], strict=False))
    return [(ids[a:b].tolist(), np.flatnonzero(masked[a:b]).tolist()) for a, b in bounds]


@pytest.mark.parametrize("block_size", [1 << 30, 64, 7])
@pytest.mark.parametrize("lengths", [[1, 2, 3, 8], [200, 129, 65, 64]])
def test_same_draws_give_the_originals_spans(block_size: int, lengths: list[int]) -> None:
    """__getitem__ and replace: blocks from the second token on, a span of each, 80/10/10 of its tokens."""
    samples = samples_of(lengths)
    keys = samples_from(samples).keys
    for sample, key, (ids, masked) in zip(
        samples, keys, corrupt(samples, SpanRules(0.5, block_size, 0.1, 0.1, MASK, TEXT)), strict=True
    ):
        state = np.uint64(stream(KEY, *key))
        positions, wanted = np.arange(len(sample.input_ids)), []
        for begin in range(1, len(positions), block_size):
            block = positions[begin : begin + block_size]
            size = max(1, len(block) // 2)  # mask_len = max(1, int(len * 0.5))
            choices = block[: len(block) - size + 1]
            start = choices[below(np.uint64(word_at(state, 3 * begin)), len(choices))]
            wanted += positions[start : start + size].tolist()
        assert masked == wanted
        expected = sample.input_ids.copy()
        for position in wanted:
            draw = uniform(np.uint64(word_at(state, 3 * position + 1)))
            if 0.1 <= draw < 0.2:
                expected[position] = TEXT[below(np.uint64(word_at(state, 3 * position + 2)), len(TEXT))]
            elif draw >= 0.2:
                expected[position] = MASK
        assert ids == expected.tolist()


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5, 0.9])
def test_a_span_is_the_share_of_its_block_rounded_down(share: float) -> None:
    lengths = list(range(2, 40))
    for length, (_, masked) in zip(
        lengths, corrupt(samples_of(lengths), SpanRules(share, 99, 0, 0, MASK, TEXT)), strict=True
    ):
        assert len(masked) == max(1, math.floor((length - 1) * share))
