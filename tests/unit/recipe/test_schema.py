"""The schema: defaults, and types of every setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import EvaluationConfig, RunConfig
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
