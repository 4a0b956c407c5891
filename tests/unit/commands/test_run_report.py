"""The report of a run: a picture and a page; what is no run, or damaged, is one message."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ctxlm_ds.commands.run_report import main
from ctxlm_ds.errors import DataError


def report(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["ctxlm report", *map(str, words)])
    main()


def make_run(folder: Path, metrics: str) -> Path:
    (folder / "config.yaml").write_text("name: a<b\ntraining:\n  max_steps: 20\n")
    (folder / "metrics.jsonl").write_text(metrics)
    return folder


def test_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"step": step, "masked_lm": 7 - step / 10, "learning_rate": 1e-3} for step in range(1, 11)]
    report(monkeypatch, make_run(tmp_path, "".join(f"{json.dumps(record)}\n" for record in records)))
    shown = capsys.readouterr().out
    assert "loss (nats)" in shown and shown.endswith(f"all curves: {tmp_path / 'report.html'}\n")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 2 and "max_steps: 20" in page and "a&lt;b" in page and "accuracy" not in page


@pytest.mark.parametrize(
    ("metrics", "message"),
    [("", "no step of the run is finished"), ('{"step": 1}\n{"st', "is damaged"), ("[1]\n", "a line is no object")],
)
def test_what_is_no_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metrics: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        report(monkeypatch, make_run(tmp_path, metrics))


def test_what_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no such file; give the directory of a run"):
        report(monkeypatch, tmp_path)
