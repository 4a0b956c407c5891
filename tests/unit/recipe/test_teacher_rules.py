"""A teacher's model against objective, rows, vocabulary and layout, each problem under the teacher's path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.teacher_rules import needs_teacher, teacher_problems

TEACHER = {"family": "bert", "vocab_size": 500, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}


def config_of(teacher: dict[str, Any] | None = TEACHER, **sections: dict[str, Any]) -> RunConfig:
    values: dict[str, Any] = {
        "model": {**TEACHER, "num_layers": 2}, "objective": {"name": "distillation"},
        "data": {"sample_format": "full_sentences", "seq_length": 64},
    }  # fmt: skip
    if teacher is not None:
        values["teacher"] = {"model": teacher}
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return RunConfig.model_validate(values)


def problems(config: RunConfig) -> Iterator[Problem]:
    return teacher_problems(config.teacher, config.model, config.data, config.objective, config.parallel)


def test_a_teacher_that_fits_has_no_problem() -> None:
    assert needs_teacher(config_of().objective)
    assert not needs_teacher(config_of(objective={"name": "masked_lm"}).objective)
    assert list(problems(config_of())) == []
    assert list(problems(config_of(None))) == [], "its model is not known yet"
    assert list(problems(config_of(None, objective={"name": "masked_lm"}))) == []


@pytest.mark.parametrize(
    ("config", "path", "words"),
    [
        (config_of(objective={"name": "masked_lm"}), "teacher", "objective.name masked_lm compares with no"),
        (config_of({**TEACHER, "vocab_size": 501}), "model.vocab_size", "500 rows, but the teacher has 501"),
        (config_of({**TEACHER, "hidden_size": 32}), "model.hidden_size", "64, but the teacher has 32"),
        (config_of({**TEACHER, "num_attention_heads": 7}), "teacher.model.num_attention_heads",
         "7 does not divide teacher.model.hidden_size 64"),
        (config_of({**TEACHER, "max_position_embeddings": 63}), "data.seq_length",
         "64 is longer than teacher.model.max_position_embeddings 63"),
        (config_of({**TEACHER, "intermediate_size": 127}, parallel={"tensor_parallel_size": 2}),
         "parallel.tensor_parallel_size", "2 does not divide teacher.model.intermediate_size 127"),
        (config_of({"family": "gpt2", "vocab_size": 500, "hidden_size": 64, "num_attention_heads": 4}),
         "teacher.model.family", "gpt2 does not compute predicted_logits"),
    ],
)  # fmt: skip
def test_a_problem_is_told_with_the_teachers_settings(config: RunConfig, path: str, words: str) -> None:
    (problem,) = problems(config)
    assert (problem.path, problem.text.startswith(words)) == (path, True), problem
    assert "teacher" in problem.path or any("teacher" in name for name in problem.involves) or path == "teacher"
