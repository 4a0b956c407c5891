"""The schema: defaults, types of every setting, and a global batch that grows as megatron-core's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

from ctxlm_ds.recipe.check import find_problems
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import EvaluationConfig, RunConfig, TrainingConfig
from tests.unit.recipe.test_load import line_about, problems_of, write
from tests.unit.recipe.test_yaml_source import refusal


def test_empty_recipe_is_the_schema_s_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "r.yaml", "")) == RunConfig()
    assert load_config(write(tmp_path / "r.yaml", "# nothing\nmodel:\n")) == RunConfig()


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ('training.max_steps="12"', "training.max_steps", ["12", "whole number from 1 to", "without quotes"]),
        ("training.max_steps=1.5", "training.max_steps", ["1.5", "whole number from 1 to"]),
        ("training.max_steps=true", "training.max_steps", ["true", "whole number"]),
        ("training.seed=-1", "training.seed", ["-1", "of at least 0"]),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate", ['"fast"', "a number above 0"]),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate", ["inf", "a number above 0"]),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate", ["nan", "a number above 0"]),
        ("optimizer.betas=[0.9]", "optimizer.betas[1]", ["missing", "from 0 to 1"]),
        ("optimizer.betas=[0.9, 1.5]", "optimizer.betas[1]", ["1.5", "from 0 to 1"]),
        ("data.packing=1", "data.packing", ["1", "true or false"]),
        ("data.packing=yes", "data.packing", ['"yes"', "true or false"]),
        ("data.train=wiki", "data.train", ['"wiki"', "a list of text", "[wiki]"]),
        ("training.precision=bf61", "training.precision", ["bf61", "bf16, fp16, fp32", "did you mean bf16?"]),
        ("training=5", "training", ["5", "a section with global_batch_size"]),
        ("model.hidden_size.x=5", "model.hidden_size", ["a section with x", "whole number"]),
        ("model.vocab_size=big", "model.vocab_size", ['"big"', "or null"]),
        ("model.hidden_size=null", "model.hidden_size", ["null", "whole number"]),
    ],
)
def test_wrong_types(tmp_path: Path, override: str, path: str, expected: list[str]) -> None:
    problems = problems_of(write(tmp_path / "r.yaml", ""), [override])
    line = line_about(problems, path)
    for words in (*expected, f"[--set {override}]"):
        assert words in line
    assert len(problems) == 1


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "override",
    [
        "model.hidden_size=10000000001", "model.num_layers=1000000000", "model.intermediate_size=1000000000000000",
        "training.micro_batch_size=2147483648", "data.num_workers=100000000", "data.prefetch_steps=1000000000",
        "data.num_duplicates=1000000000", "optimizer.learning_rate=1e300", "optimizer.eps=1e300",
        "data.train=[{path: a, epochs: 1e300}]", "training.seed=99999999999999999999", "watchdog.step_minutes=1e300",
    ],
)  # fmt: skip
def test_numbers_beyond_reason_are_refused(tmp_path: Path, override: str) -> None:
    assert "expected a" in refusal(tmp_path / "r.yaml", "{}", override)


def test_settings_of_texts_are_idle_without_texts() -> None:
    idle = ("continuation_tokens", "continuation_temperature")
    assert EvaluationConfig().idle_settings == idle and not EvaluationConfig().continues
    for settings in ({"continuations": 2}, {"prompts": ["The quiet"]}):
        evaluation = EvaluationConfig.model_validate(settings)
        assert evaluation.continues and evaluation.idle_settings == ()


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
