"""The report: pictures, tables and wrong predictions of every kind of task."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.fit import Point
from ctxlm_ds.apps.downstream.results import summarize, write_report
from ctxlm_ds.apps.downstream.task import TaskDescription

POINT = Point(8, 1e-3, 2, 1)
CASES: list[tuple[dict[str, Any], Example, Any]] = [
    (
        {"kind": "classification", "format": "tsv", "columns": {"text": 0, "label": 1}},
        Example("f:1", "<b>a", label="x"),
        "y",
    ),
    ({"kind": "regression", "format": "tsv", "columns": {"text": 0, "label": 1}}, Example("f:1", "a", "b", "2.0"), 1.5),
    (
        {"kind": "tagging", "format": "conll", "columns": {"text": 0, "label": 1}},
        Example("f:1", words=("a",), tags=("N",)),
        ["V"],
    ),
    ({"kind": "question_answering", "format": "squad"}, Example("f:1", "a b", "who?", answers=(("a", 0),)), "b"),
]


@pytest.mark.parametrize(("settings", "example", "prediction"), CASES)
def test_a_report_of_each_kind(tmp_path: Path, settings: dict[str, Any], example: Example, prediction: Any) -> None:
    task = TaskDescription(train="t", dev="d", header=False, **settings)
    metric = task.judged_by[0]
    log = [{f"eval_{metric}": 0.25, "epoch": 1.0}, {f"eval_{metric}": 0.5, "epoch": 2.0}]
    results = [{"point": asdict(POINT), "dev": {metric: 0.5}, "log": log}]
    folder = tmp_path / "points" / POINT.name
    folder.mkdir(parents=True)
    row = {"id": "1", "example": example.shown_text(), "label": example.shown_label(), "prediction": prediction}
    rows = [row | {"right": False}, row | {"right": True, "example": "not shown"}]
    (folder / "dev_predictions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    summary = {"task": "mine", "model": "M", "published": {"bert": 0.9}} | summarize(results, metric)
    write_report(tmp_path, task, summary, results)
    page = (tmp_path / "report.html").read_text()
    assert "0.5000 (0.5000 to 0.5000)" in page and "0.900" in page and "<b>a" not in page
    is_matrix = "<tr><td>x</td><td></td><td>2</td></tr>"
    assert (is_matrix in page) == (settings["kind"] == "classification")
    assert "batch 8, rate 0.001, epochs 2 0.5</text>" in page
    assert "<td>M</td>" in page and "not shown" not in page
