"""Bootstrap intervals: that of a mean is near the normal one, groups keep their sizes, and each kind is scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.apps.evaluate.command import Job, Model, bootstrap, interval_of, read_examples
from tests.unit.apps.evaluate.test_suite import entries


def test_the_interval_of_a_mean_is_near_the_normal_one() -> None:
    values = np.random.default_rng(3).normal(size=400)
    low, high = bootstrap(lambda chosen: values[chosen].mean(), [0] * 400, 1000)
    half = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)
    assert (low, high) == bootstrap(lambda chosen: values[chosen].mean(), [0] * 400, 1000)


def test_examples_are_drawn_within_their_group() -> None:
    groups = ["a", "b", "a", "c", "c"]
    counts = {name: groups.count(name) for name in groups}
    drawn = []
    bootstrap(lambda chosen: drawn.append([groups[at] for at in chosen]) or 0.0, groups, 20)
    assert len(drawn) == 20 and all({name: one.count(name) for name in one} == counts for one in drawn)
    constant = np.array([1.0, 0.0, 1.0, 0.5, 0.5])
    assert bootstrap(lambda chosen: constant[chosen].mean(), groups, 20) == (0.6, 0.6)


QUESTIONS = [{"id": at, "question": "who?", "answers": [{"text": "Ann", "answer_start": 0}]} for at in range(3)]
SQUAD = {"data": [{"paragraphs": [{"context": "Ann met", "qas": QUESTIONS}]}]}
COLUMNS = {"text": 0, "label": 1}
KINDS: list[tuple[dict[str, Any], str, list[Any], list[Any]]] = [
    ({"kind": "tagging", "format": "conll", "scheme": "iob1", "columns": COLUMNS}, "Ann I-P\nmet O\n\n" * 3,
     ["B-P", "O"], ["O", "O"]),
    ({"kind": "regression", "format": "tsv", "header": False, "columns": COLUMNS, "metrics": ["mse"]},
     "a\t1\nb\t1\nc\t1\n", 0.0, 2.0),
    ({"kind": "question_answering", "format": "squad", "metrics": ["exact_match"]}, json.dumps(SQUAD), "Ann", "met"),
    ({"kind": "span_classification", "format": "conll", "scheme": "iob1", "columns": COLUMNS}, "Ann I-P\nmet O\n\n" * 3,
     [[0, 1, "P"]], []),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "text", "right", "wrong"), KINDS, ids=lambda one: str(one)[:20])
def test_predictions_of_each_kind_are_scored_again(
    tmp_path: Path, settings: dict[str, Any], text: str, right: Any, wrong: Any
) -> None:
    (tmp_path / "file").write_text(text)
    (tmp_path / "mine.yaml").write_text(json.dumps({"train": "file", "dev": "file", **settings}))
    (entry,) = entries(tmp_path, {"mine": {"task": "mine.yaml"}})
    assert entry.task is not None
    job, metric = Job(Model("m", tmp_path), entry, tmp_path, "babylm", None), entry.task.judged_by[0]
    for seed, values in ((1, [right] * 3), (2, [right, wrong, wrong])):
        folder = tmp_path / "points" / f"x-seed{seed}"
        folder.mkdir(parents=True)
        lines = (json.dumps({"prediction": value}) + "\n" for value in values)
        (folder / "dev_predictions.jsonl").write_text("".join(lines))
    examples = read_examples(entry)
    exact = interval_of(job, examples, {"chosen": {"seeds": [1]}, "metric": metric})
    assert exact == (1.0, 1.0)
    low, high = interval_of(job, examples, {"chosen": {"seeds": [1, 2]}, "metric": metric})
    assert low == high == 1.0 if metric == "mse" else 0.5 <= low < high <= 1.0


@pytest.mark.parametrize(("values", "mean", "has_one"), [
    ([0.0, 1.0, 1.0, 0.0], 0.5, True), ([-2.0, -4.0, -3.0, -3.0], 20.1, False), ([None] * 4, 0.5, False),
])  # fmt: skip
def test_a_metric_that_is_no_mean_over_examples_has_none(
    tmp_path: Path, values: list[float | None], mean: float, has_one: bool
) -> None:
    """The harness's perplexity is exp of the negative mean of log-likelihoods, its correlations are of all examples."""
    (entry,) = entries(tmp_path, {"mine": {"task": "lm-eval", "harness": "some"}})
    folder = tmp_path / "points" / "seed0"
    folder.mkdir(parents=True)
    lines = (json.dumps({"id": at, "value": value}) + "\n" for at, value in enumerate(values))
    (folder / "dev_predictions.jsonl").write_text("".join(lines))
    summary = {"chosen": {"seeds": [0], "dev": {"acc": {"mean": mean}}}, "metric": "acc"}
    found = interval_of(Job(Model("m", tmp_path), entry, tmp_path, "babylm", None), None, summary)
    assert (found is not None) == has_one
