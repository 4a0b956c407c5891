"""Rows of several samples."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ctxlm_ds.data.samples.packing import WINDOW_SAMPLES, fit_rows, pack_samples


def rows_of(lengths: np.ndarray, seq_length: int, most: int, seed: int = 0) -> list[list[int]]:
    rows = []
    for numbers, counts in pack_samples(lengths, seq_length, most, seed):
        rows.extend(part.tolist() for part in np.split(numbers, np.cumsum(counts)[:-1]))
    return rows


@pytest.mark.parametrize(("seq_length", "most"), [(128, 8), (128, 2), (512, 100), (64, 1)])
def test_rows_hold_every_sample_once_within_the_limits(seq_length: int, most: int) -> None:
    lengths = np.random.default_rng(0).integers(5, seq_length + 1, size=3000)
    rows = rows_of(lengths, seq_length, most)
    assert sorted(sum(rows, [])) == list(range(3000))
    assert all(lengths[row].sum() <= seq_length and 1 <= len(row) <= most for row in rows)


def test_rows_are_well_filled() -> None:
    lengths = np.random.default_rng(1).integers(5, 100, size=20_000)
    rows = rows_of(lengths, 128, 64)
    assert lengths.sum() / (len(rows) * 128) > 0.97


def test_takes_the_fullest_row_that_has_room() -> None:
    assert fit_rows([7, 6, 4, 3, 2], 10, 8) == [[0, 3], [1, 2], [4]]
    assert fit_rows([5, 5, 5], 10, 1) == [[0], [1], [2]]
    assert fit_rows([10, 10], 10, 4) == [[0], [1]]


def test_depends_on_the_seed_and_mixes_neighbours() -> None:
    lengths = np.full(1000, 30)
    assert rows_of(lengths, 128, 4, 1) == rows_of(lengths, 128, 4, 1)
    assert rows_of(lengths, 128, 4, 1) != rows_of(lengths, 128, 4, 2)
    spread = [max(row) - min(row) for row in rows_of(lengths, 128, 4, 1)]
    assert np.median(spread) > 300


def test_several_windows() -> None:
    lengths = np.random.default_rng(2).integers(5, 128, size=WINDOW_SAMPLES + 1234)
    began_s = time.perf_counter()
    rows = rows_of(lengths, 128, 8)
    assert time.perf_counter() - began_s < 10
    assert sorted(sum(rows, [])) == list(range(len(lengths)))
