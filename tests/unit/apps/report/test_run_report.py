"""The report of a run: a picture and a page; what is no run, or damaged, is one message."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ctxlm_ds.apps.report.run_report import main
from ctxlm_ds.errors import ConfigError, DataError


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


def test_two_runs_over_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"step": 1, "masked_lm": 7.0}) + "\n"
    runs = [tmp_path / name for name in ("one", "other")]
    for run in runs:
        run.mkdir()
        make_run(run, line)
    (runs[1] / "config.yaml").write_text("name: b\ntraining:\n  max_steps: 30\n")
    picture = tmp_path / "curves.png"
    report(monkeypatch, *runs, "--output", tmp_path / "both.html", "--png", picture)
    page = (tmp_path / "both.html").read_text()
    assert "a&lt;b training 7" in page and "b training 7" in page
    assert "<td>training.max_steps</td><td>20</td><td>30</td>" in page and "<td>model.family</td>" not in page
    assert picture.read_bytes().startswith(b"\x89PNG") and not (runs[0] / "report.html").exists()


def test_a_sweep_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep.txt").write_text("optimizer.learning_rate=1e-4\noptimizer.learning_rate=2e-4\n\n")
    for task, rate in enumerate(("1.0e-4", "2.0e-4", "3.0e-4")):
        (tmp_path / str(task)).mkdir()
        text = f"name: a\nrun_dir: {tmp_path}/{task}\noptimizer: {{learning_rate: {rate}}}\n"
        lines = [{"step": step, "loss": 7.0 - step - task, "masked_lm": 7.0 - step - task} for step in (1, 2)]
        (tmp_path / str(task) / "config.yaml").write_text(text)
        (tmp_path / str(task) / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "2" / "metrics.jsonl").write_text("")
    report(monkeypatch, tmp_path, "--output", tmp_path / "folder.html")
    shown = capsys.readouterr().out
    table = shown.splitlines()[-4:-1]
    assert [row.split() for row in table] == [
        ["run", "step", "loss", "different", "settings"],
        [f"{tmp_path}/0", "2", "5.0000", "optimizer.learning_rate=0.0001"],
        [f"{tmp_path}/1", "2", "4.0000", "optimizer.learning_rate=0.0002"],
    ]
    assert f"{tmp_path}/2: no step is finished yet; left out" in shown
    report(monkeypatch, *sorted(tmp_path.glob("*")), "--output", tmp_path / "folder.html")
    assert capsys.readouterr().out == shown, "the shell's pattern matches sweep.txt and folder.html, too"
    with pytest.raises(DataError, match="no such file"):
        report(monkeypatch, tmp_path / "0", tmp_path / "none")


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxlm_ds.installed.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"matplotlib: not installed; pip install 'ctxlm_ds\[downstream\]'"):
        report(monkeypatch, make_run(tmp_path, '{"step": 1}\n'), "--png", tmp_path / "curves.png")


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
