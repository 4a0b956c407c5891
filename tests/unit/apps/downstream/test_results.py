"""The report: pictures, tables and wrong predictions of every kind of task.

Grids: points, results that are kept, the median over seeds, and the chosen point.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.fit import Point
from ctxlm_ds.apps.downstream.kinds.base import Kind
from ctxlm_ds.apps.downstream.kinds.sequence import Classification, Regression
from ctxlm_ds.apps.downstream.kinds.tagging import Tagging
from ctxlm_ds.apps.downstream.results import (
    PUBLISHED,
    grid_points,
    is_done,
    read_results,
    result_rows,
    summarize,
    write_report,
)
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.errors import ConfigError

POINT = Point(8, 1e-3, 2, 1)
COLUMNS = {"text": 0, "label": 1}
CASES: list[tuple[dict[str, Any], Example, Any]] = [
    ({"kind": "classification", "format": "tsv", "columns": COLUMNS}, Example("f:1", "<b>a", label="x"), "y"),
    ({"kind": "regression", "format": "tsv", "columns": COLUMNS}, Example("f:1", "a", "b", "2.0"), 1.5),
    ({"kind": "tagging", "format": "conll", "columns": COLUMNS}, Example("f:1", words=("a",), tags=("N",)), ["V"]),
    ({"kind": "question_answering", "format": "squad"}, Example("f:1", "a b", "who?", answers=(("a", 0),)), "b"),
]


@pytest.mark.parametrize(("settings", "example", "prediction"), CASES)
def test_a_report_of_each_kind(tmp_path: Path, settings: dict[str, Any], example: Example, prediction: Any) -> None:
    task = TaskDescription(train="t", dev="d", header=False, **settings)
    metric = task.judged_by[0]
    log = [{f"eval_{metric}": 0.25, "epoch": 1.0}, {f"eval_{metric}": 0.5, "epoch": 2.0}]
    results = [{"point": asdict(POINT), "dev": {metric: 0.5}, "log": log, "examples": {"dev": 731}}]
    folder = tmp_path / "points" / POINT.name
    folder.mkdir(parents=True)
    row = {"id": "1", "example": example.shown_text(), "label": example.shown_label(), "prediction": prediction}
    rows = [row | {"right": False}, row | {"right": True, "example": "not shown"}]
    (folder / "dev_predictions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    summary = {"task": "mine", "model": "M", "published": {"bert": 0.9}} | summarize(results, metric)
    write_report(tmp_path, task, summary, results)
    page = (tmp_path / "report.html").read_text()
    assert "<th>seeds</th><th>n dev</th>" in page and "<td>1</td><td>731</td>" in page
    assert "0.5000 (0.5000 to 0.5000)" in page and "0.900" in page and "<b>a" not in page
    is_matrix = "<tr><td>x</td><td></td><td>2</td></tr>"
    assert (is_matrix in page) == (settings["kind"] == "classification")
    assert "batch 8, rate 0.001, epochs 2 0.5</text>" in page
    assert "<td>M</td>" in page and "not shown" not in page


def result(rate: float, seed: int, accuracy: float) -> dict[str, Any]:
    return {"point": asdict(Point(8, rate, 3, seed)), "dev": {"accuracy": accuracy, "mse": accuracy}, "log": []}


@pytest.mark.parametrize(
    ("kind", "train", "dev", "scores"),
    [
        (Classification, ["x", "y", "y"], ["x", "y", "y", "x"], {"accuracy": 0.5}),
        (Tagging, [("N", "N", "V")], [("N", "V", "V"), ("N",)], {"accuracy": 0.5}),
        (Regression, ["1.0", "1.0"], ["2.0"], {}),
    ],
)
def test_the_table_has_a_row_of_the_most_frequent_label(
    kind: type[Kind], train: list[Any], dev: list[Any], scores: dict[str, float]
) -> None:
    name = kind.__name__.lower()
    task = TaskDescription(kind=name, format="conll" if kind is Tagging else "tsv", train="t", dev="d", header=False,
                           columns=COLUMNS, metrics=["mse" if kind is Regression else "accuracy"])  # fmt: skip
    sides = [
        [Example("f:1", words=one, tags=one) if kind is Tagging else Example("f:1", "a", label=one) for one in side]
        for side in (train, dev)
    ]
    found = kind(task, None, ["x", "y"], 8).most_frequent(*sides)
    assert found == scores
    head, *rows = result_rows(summarize([result(1e-3, 1, 0.9) | {"most_frequent": found}], "accuracy"))
    assert [row[0] for row in rows] == ["chosen", *(["most frequent label"] if scores else [])]
    assert all(len(row) == len(head) for row in rows)
    assert not scores or rows[1][head.index("accuracy")] == "0.5000"


def test_the_published_grid_has_18_points_a_seed() -> None:
    points = grid_points(PUBLISHED["batch_sizes"], PUBLISHED["learning_rates"], PUBLISHED["epochs"], [1, 2])
    assert len(set(points)) == 36 and points[0].name == "batch16-lr2e-05-epochs2-seed1"


def test_the_best_median_is_chosen_not_the_best_run() -> None:
    results = [result(1e-3, seed, value) for seed, value in enumerate([0.5, 0.6, 0.99])]
    results += [result(2e-3, seed, value) for seed, value in enumerate([0.7, 0.7, 0.8])]
    summary = summarize(results, "accuracy")
    assert summary["chosen"]["learning_rate"] == 2e-3
    spread = summary["grid"][0]["dev"]["accuracy"]
    assert spread == {"median": 0.6, "mean": pytest.approx(2.09 / 3), "lowest": 0.5, "highest": 0.99}
    results += [result(3e-3, 1, float("nan"))]
    assert summarize(results, "accuracy")["chosen"]["learning_rate"] == 2e-3
    assert summarize(results, "mse")["chosen"]["learning_rate"] == 1e-3


def test_finished_points_are_kept_and_others_of_other_settings_refused(tmp_path: Path) -> None:
    folder = tmp_path / "points" / "batch8-lr0.001-epochs3-seed1"
    assert not is_done(folder, {"x": 1})
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({"x": 1}))
    assert not is_done(folder, {"x": 1})
    (folder / "metrics.json").write_text(json.dumps(result(1e-3, 1, 0.5)))
    assert is_done(folder, {"x": 1})
    assert read_results(tmp_path, {"x": 1}) == [result(1e-3, 1, 0.5)]
    (tmp_path / "points" / f"{folder.name}.partial-1").mkdir()
    (tmp_path / "points" / f"{folder.name}.partial-1" / "metrics.json").write_text("{}")
    assert len(read_results(tmp_path, {"x": 1})) == 1
    with pytest.raises(ConfigError, match=r"x 1 -> 2; choose another --output"):
        is_done(folder, {"x": 2})
