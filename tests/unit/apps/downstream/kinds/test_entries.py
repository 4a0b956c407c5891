"""Kinds of tasks by name: every class exists, and the kind of docs/extending.md is one like the shipped ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ctxlm_ds.apps.downstream.kinds.base import Kind, Prediction
from ctxlm_ds.apps.downstream.kinds.entries import TASKS
from ctxlm_ds.apps.downstream.prepare import kind_class
from ctxlm_ds.apps.downstream.task import load_task
from ctxlm_ds.registry import load_object
from tests.downstream_models import sentiment
from tests.integration.pages import write_files


@pytest.mark.parametrize("name", TASKS.shipped_names())
def test_every_class_of_a_kind_exists(name: str) -> None:
    entry = TASKS.get(name)
    for target in filter(None, (entry.runs, entry.frozen, *entry.forms.values())):
        assert issubclass(load_object(target), Kind)
    assert entry.metrics and set(entry.needed).isdisjoint(entry.allowed)
    assert entry.always is None or entry.always in entry.forms


def test_a_package_adds_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files("extending.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TASKS._added, "stars", "toy_stars:STARS")
    description = tmp_path / "reviews.yaml"
    description.write_text(
        "kind: stars\ntrain: a.tsv\ndev: b.tsv\nformat: tsv\ncolumns: {text: s, label: y}\nlabels: ['1', '2', '3']\n"
    )
    try:
        _, task = load_task(str(description))
        _, examples = sentiment(2)
        found = kind_class(task)
        kind = found(task, None, found.find_labels(task, examples), 16)
        rated = [type(one)(one.origin, one.text, label="3") for one in examples]
        scores = kind.score([Prediction("3"), Prediction("1")], rated)
    finally:
        TASKS._loaded.pop("stars", None)
        sys.modules.pop("toy_stars", None)
        sys.modules.pop("toy_stars_model", None)
    assert task.judged_by == ["accuracy", "distance"] and scores == {"accuracy": 0.5, "distance": 1.0}
