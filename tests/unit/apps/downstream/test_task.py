"""Task descriptions: the shipped ones load, and a wrong one is refused with every problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.apps.downstream.task import load_task, shipped
from ctxlm_ds.errors import ConfigError

GOOD = "kind: classification\ntrain: a.tsv\ndev: b.tsv\nformat: tsv\ncolumns: {text: s, label: y}\n"


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_task_loads(name: str) -> None:
    found, task = load_task(name)
    assert found == name and task.title and task.judged_by


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("format: tsv", "format: conll"), "read from tsv or csv or jsonl"),
        (("text: s, ", ""), r"columns\.text: missing"),
        (("text: s", "text: s, pear: x"), "unknown role; did you mean pair"),
        (("kind: classification", "kind: clasification"), r"kind: .*did you mean classification\?"),
        (("format: tsv", "format: tvs"), r"did you mean tsv\?"),
        (("format: tsv", "format: tsv\nmetrics: [acuracy]"), r"has the metrics accuracy.*did you mean accuracy\?"),
        (("train: a.tsv", "trian: a.tsv"), "did you mean train"),
        (("format: tsv", "format: tsv\nmetrics: [bleu]"), "has the metrics accuracy"),
        (("format: tsv", "format: tsv\nheader: false"), "numbers from 0"),
        (("format: tsv", "format: tsv\nscheme: iob1"), "only tasks of kind tagging"),
        (("format: tsv", "format: tsv\nvalidation_share: 0.1"), "either a file for development or validation_share"),
    ],
)
def test_a_wrong_description_is_refused(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert load_task(str(path))[1].judged_by[0] == "accuracy"
    path.write_text(GOOD.replace(*change))
    with pytest.raises(ConfigError, match=message):
        load_task(str(path))


def test_labels_are_as_json_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD + "labels: [true, false, 0, new]\n")
    assert load_task(str(path))[1].labels == ["true", "false", "0", "new"]
