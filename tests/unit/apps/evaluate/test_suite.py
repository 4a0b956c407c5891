"""Suites: the shipped ones name known tasks, a user's own, its problems in one error each, and folders of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.downstream.task import shipped
from ctxlm_ds.apps.evaluate.suite import SUITE_DIR, Entry, entries_of, is_suite, load_suite
from ctxlm_ds.errors import ConfigError, DataError
from tests.downstream_models import sentiment, write_task


def entries(folder: Path, tasks: dict[str, Any], *only: str) -> list[Entry]:
    (folder / "suite.yaml").write_text(json.dumps({"tasks": tasks, "source": "a paper"}))
    return entries_of(*load_suite(str(folder / "suite.yaml")), folder, only)


@pytest.mark.parametrize("name", shipped(SUITE_DIR))
def test_a_shipped_suite_names_known_tasks(name: str, tmp_path: Path) -> None:
    for folder in ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "conll2003", "squad", "sick"):
        (tmp_path / folder).mkdir()
    path, suite = load_suite(name)
    found = entries_of(path, suite, tmp_path)
    assert is_suite(name) and suite.title and [one.name for one in found] == list(suite.tasks)
    for one in found:
        published = one.task.published if one.task and one.settings.published is None else one.settings.published
        assert one.source or not published


def test_a_task_that_starts_from_another_one_is_behind_it(tmp_path: Path) -> None:
    write_task(tmp_path, *[sentiment(4)[1]] * 2)
    mine = {"task": "mine.yaml", "files": "DA-TA", "seeds": [3, 4]}
    found = entries(tmp_path, {"late": mine | {"start": "early"}, "early": mine, "other": mine}, "late")
    assert [(one.name, one.saves, one.start_seed) for one in found] == [("early", True, None), ("late", False, 3)]
    alone = entries(tmp_path, {"late": mine | {"start": "early"}, "early": mine}, "early")
    assert [(one.name, one.saves) for one in alone] == [("early", True)]
    assert all(one.data == tmp_path / "data" and one.seeds == [3, 4] for one in found)
    assert found[0].described == str(tmp_path / "mine.yaml") and found[0].source == "a paper"
    assert not is_suite(str(tmp_path / "mine.yaml")) and is_suite(str(tmp_path / "suite.yaml"))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"task": "cola", "file": "."}, r"tasks.one.file: unknown setting; did you mean files\?"),
        ({"task": "cole"}, "cole: no shipped task; did you mean cola"),
        ({"task": "cola", "seeds": []}, r"tasks.one.seeds: .* at least 1 item"),
        ({"task": "cola", "metric": "f1"}, "tasks.one.metric: f1 is no metric of cola"),
        ({"task": "cola", "start": "tow"}, r"tasks.one.start: tow: name a fine-tuned task .*did you mean two\?"),
        ({"task": "cola", "first_pairs": 3}, "tasks.one.first_pairs: only for minimal-pairs"),
        ({"task": "minimal-pairs", "epochs": 3}, "tasks.one.epochs: only for tasks of fine-tuning"),
        ({"task": "minimal-pairs", "seeds": [1, 2]}, "tasks.one.seeds: only for tasks of fine-tuning"),
        ({"task": "cola", "seeds": [1, 2, 1]}, "tasks.one.seeds: give each seed once"),
    ],
)
def test_a_problem_is_one_error(tmp_path: Path, task: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        entries(tmp_path, {"one": task, "two": {"task": "cola"}})


def test_names_and_folders_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no shipped suite; did you mean glue\?"):
        load_suite("gleu")
    with pytest.raises(DataError, match="none: no such file or folder; --data is the folder"):
        entries(tmp_path, {"one": {"task": "cola", "files": "none"}})
    with pytest.raises(ConfigError, match="tasks.a/b: a name has letters"):
        entries(tmp_path, {"a/b": {"task": "cola"}})
    with pytest.raises(ConfigError, match="--tasks two: the suite has one"):
        entries(tmp_path, {"one": {"task": "cola"}}, "two")
