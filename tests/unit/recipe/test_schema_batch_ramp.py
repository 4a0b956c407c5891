"""A growing global batch: sizes as megatron-core computes them, refusals, and what a run reads in all."""

from __future__ import annotations

import random
from typing import Any

import pytest
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

from ctxlm_ds.recipe.check import find_problems
from ctxlm_ds.recipe.schema import RunConfig, TrainingConfig


def ramps() -> list[tuple[int, int, int, int]]:
    """Global batch, start, increment and rows: GPT-3 (Brown 2020, table 2.1), steps of one row, thirds, random ones.

    Of 1 to 8 within 9 rows the last size is 7: 9 / (9 / 7) is less than 7.
    """
    rng = random.Random(5)
    found = [(1536, 16, 16, 5_859_375), (7, 4, 1, 100), (4, 1, 1, 100), (8, 4, 4, 1), (32, 8, 24, 10**6), (8, 1, 1, 9)]
    for _ in range(60):
        start, increment, count = rng.randint(1, 40), rng.randint(1, 40), rng.randint(1, 60)
        found.append((start + count * increment, start, increment, rng.randint(1, 20_000)))
    return found


def test_every_step_has_the_size_of_megatron_s() -> None:
    for size, start, increment, rows in ramps():
        training = TrainingConfig(global_batch_size=size, micro_batch_size=1, batch_ramp=(start, increment, rows))
        theirs = RampupBatchsizeNumMicroBatchesCalculator(size, 1, 1, False, 0, start, increment, rows)
        read = 0
        for step in range(400):
            theirs.update(read, consistency_check=True)
            assert training.batch_size_at(read) == theirs.get_current_global_batch_size() == theirs.get()
            read += theirs.get()
            assert training.rows_after(step + 1) == read
        for place in range(0, rows + 2, max(1, rows // 500)):
            theirs.update(place, consistency_check=True)
            assert training.batch_size_at(place) == theirs.get_current_global_batch_size()
        assert training.batch_size_at(rows + 1) == size
        assert training.rows_after(9, rows + 1) == rows + 1 + 9 * size


def test_without_a_ramp_the_batch_is_constant() -> None:
    training = TrainingConfig(global_batch_size=12)
    assert {training.batch_size_at(row) for row in (0, 5, 10**12)} == {12}
    assert training.rows_after(10**9, 7) == 7 + 12 * 10**9


@pytest.mark.parametrize(
    ("ramp", "world_size", "words"),
    [
        ([64, 8, 1000], None, ["64 does not grow by 8 to training.global_batch_size 64"]),
        ([80, 8, 1000], None, ["80 does not grow"]),
        ([8, 24, 1000], None, ["8 does not grow by 24"]),
        ([8, 8, 1000], 2, ["multiples of", "= 16"]),
        ([4, 4, 1000], None, ["multiples of", "= 8"]),
        ([16, 8, 1000], 2, ["= 16"]),
    ],
)
def test_an_impossible_ramp_is_refused(ramp: list[int], world_size: int | None, words: list[str]) -> None:
    training = {"global_batch_size": 64, "micro_batch_size": 8, "batch_ramp": ramp}
    (problem,) = find_problems(RunConfig.model_validate({"training": training}), world_size)
    assert problem.path == "training.batch_ramp"
    for word in words:
        assert word in problem.text


@pytest.mark.parametrize("world_size", [None, 1, 2])
def test_a_possible_ramp_is_not(world_size: int | None) -> None:
    training: dict[str, Any] = {"global_batch_size": 64, "micro_batch_size": 8, "batch_ramp": [16, 16, 1000]}
    assert not find_problems(RunConfig.model_validate({"training": training}), world_size)
