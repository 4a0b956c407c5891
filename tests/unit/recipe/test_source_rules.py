"""Sources of a recipe: both ways to write them, their names, and what is said about wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import dump_config, load_config
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.source_rules import needs_teacher, source_names, teacher_problems

BLEND = """
data:
  blend: weighted
  train:
    - {path: data/wiki, weight: 3, name: encyclopedia}
    - path: data/books
      weight: 0.5
"""


def test_both_ways_to_write_a_source_survive_a_dump(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(BLEND)
    config = load_config(tmp_path / "r.yaml")
    assert [(source.path, source.weight) for source in config.data.train] == [("data/wiki", 3.0), ("data/books", 0.5)]
    plain = load_config(tmp_path / "r.yaml", ["data.blend=concatenate", "data.train=[a, {path: b, epochs: 2}]"])
    for made, written in (
        (config, [{"path": "data/wiki", "weight": 3, "name": "encyclopedia"}, {"path": "data/books", "weight": 0.5}]),
        (plain, ["a", {"path": "b", "epochs": 2}]),
    ):
        (tmp_path / "dumped.yaml").write_text(dump_config(made))
        assert yaml.safe_load(dump_config(made))["data"]["train"] == written
        assert load_config(tmp_path / "dumped.yaml") == made


def test_wrong_sources_are_told_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(BLEND.replace("weight: 0.5", "wieght: 0.5").replace("weight: 3", "weight: 0"))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "r.yaml", ["data.temperature=0.5"])
    text = str(caught.value)
    assert "data.train[1].wieght: unknown setting (value 0.5); did you mean data.train[1].weight?" in text
    assert "data.train[0].weight: 0: expected a number above 0, at most 1e+15 or null" in text
    assert f"{tmp_path / 'r.yaml'}:5" in text and f"{tmp_path / 'r.yaml'}:7" in text
    assert "data.temperature: 0.5: expected a number from 1 to 1e+06" in text
    with pytest.raises(ConfigError, match=r"data.train\[0\]: 7: expected text or a section with path, weight"):
        load_config(tmp_path / "r.yaml", ["data.train=[7]"])


def test_names_are_short_where_they_can_be() -> None:
    train = ["data/wiki", "a/text_document", {"path": "b/text_document"}, {"path": "c/text_document", "name": "books"}]
    config = RunConfig.model_validate({"data": {"train": train}})
    assert source_names(config.data) == ["wiki", "a/text_document", "b/text_document", "books"]


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
