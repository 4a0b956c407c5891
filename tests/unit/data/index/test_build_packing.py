"""Rows of several samples."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from ctxlm_ds.data.index.build import WINDOW_SAMPLES, fit_rows, pack_samples


def rows_of(lengths: np.ndarray, seq_length: int, most: int, seed: int = 0) -> list[list[int]]:
    rows = []
    for numbers, counts in pack_samples(lengths, seq_length, most, seed, 1):
        rows.extend(part.tolist() for part in np.split(numbers, np.cumsum(counts)[:-1]))
    return rows


@pytest.mark.parametrize(
    ("seq_length", "most", "count"), [(128, 8, WINDOW_SAMPLES + 1234), (128, 2, 3000), (512, 100, 3000), (64, 1, 3000)]
)
def test_rows_hold_every_sample_once_within_the_limits(seq_length: int, most: int, count: int) -> None:
    lengths = np.random.default_rng(0).integers(5, seq_length + 1, size=count)
    rows = rows_of(lengths, seq_length, most)
    assert sorted(chain.from_iterable(rows)) == list(range(count))
    assert all(lengths[row].sum() <= seq_length and 1 <= len(row) <= most for row in rows)


def test_rows_are_well_filled() -> None:
    lengths = np.random.default_rng(1).integers(5, 100, size=20_000)
    rows = rows_of(lengths, 128, 64)
    assert lengths.sum() / (len(rows) * 128) > 0.97


def plain_rows(lengths: list[int], seq_length: int, most: int) -> list[list[int]]:
    """Best fit, longest first; of rows with equal room the one that was touched last."""
    rows: list[list[int]] = []
    touched: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        rooms = {row: seq_length - sum(lengths[i] for i in rows[row]) for row in touched if len(rows[row]) < most}
        fitting = [row for row in touched if rooms.get(row, -1) >= lengths[item]]
        if fitting:
            least = min(rooms[row] for row in fitting)
            row = [row for row in fitting if rooms[row] == least][-1]
            touched.remove(row)
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(item)
        touched.append(row)
    return rows


def as_lists(items: np.ndarray, counts: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(items, np.cumsum(counts)[:-1])]


@pytest.mark.parametrize(("seq_length", "most"), [(10, 3), (63, 8), (64, 2), (65, 100), (512, 8), (1000, 4)])
def test_is_best_fit_read_plainly(seq_length: int, most: int) -> None:
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, seq_length + 1, size=200)
        assert as_lists(*fit_rows(lengths, seq_length, most)) == plain_rows(lengths.tolist(), seq_length, most)


def test_any_number_of_threads_gives_the_same_rows() -> None:
    lengths = np.random.default_rng(3).integers(5, 128, size=3 * WINDOW_SAMPLES)
    alone, together = (list(pack_samples(lengths, 128, 8, 1, workers)) for workers in (1, 3))
    assert len(alone) == len(together) == 3
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])


def test_depends_on_the_seed_and_mixes_neighbours() -> None:
    lengths = np.full(1000, 30)
    assert rows_of(lengths, 128, 4, 1) == rows_of(lengths, 128, 4, 1)
    assert rows_of(lengths, 128, 4, 1) != rows_of(lengths, 128, 4, 2)
    spread = [max(row) - min(row) for row in rows_of(lengths, 128, 4, 1)]
    assert np.median(spread) > 300
