"""One table of several output folders: spread, published scores, what is missing, curves, and folders that clash."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.evaluate.compare import main, read_runs
from ctxlm_ds.errors import ConfigError, DataError


def write_run(folder: Path, task: str, model: str, values: tuple[float, ...], **more: Any) -> Path:
    folder.mkdir(parents=True)
    point = {"batch_size": 8, "learning_rate": 1e-3, "epochs": 2.0}
    spread = {"mean": sum(values) / len(values), "lowest": min(values), "highest": max(values)}
    chosen = {**point, "seeds": list(range(len(values))), "examples": {"dev": 1500}, "dev": {"accuracy": spread}}
    summary = {"task": task, "model": model, "published": {"bert-base": 0.9}, "metric": "accuracy", "chosen": chosen}
    (folder / "metrics.json").write_text(json.dumps(summary | {"grid": [chosen]} | more))
    for seed, value in enumerate(values):
        log = [{"epoch": 1.0, "eval_accuracy": value / 2}, {"epoch": 2.0, "eval_accuracy": value}, {"epoch": 2.0}]
        path = folder / "points" / f"batch8-lr0.001-epochs2-seed{seed}" / "metrics.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"point": {**point, "seed": seed}, "log": log}))
    return folder


def test_a_table_has_every_model_and_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        write_run(tmp_path / "a", "cola", "runs/mine/hf", (0.25, 0.5, 0.75), source="GLUE"),
        write_run(tmp_path / "b", "cola", "runs/mine/hf", (0.125,), random=True),
        write_run(tmp_path / "c", "sst2", "runs/mine/hf", (0.625,), published={"large|one": 0.95}),
        write_run(tmp_path / "d", "sst2", "runs/mine/hf", (0.5,), max_train_examples=100),
        write_run(tmp_path / "e", "sst2", "w2v.txt", (0.5,), method="static vectors"),
    ]
    main([*map(str, runs), "--output", str(tmp_path / "out")])
    assert [re.split(" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()] == [
        ["task", "model", "metric", "mean", "spread (seeds)", "n", "source"],
        ["cola", "mine", "accuracy", "0.500", "0.250 to 0.750 (3)", "1,500"],
        ["cola", "mine, random weights", "accuracy", "0.125", "1,500"],
        ["cola", "bert-base (published)", "accuracy", "0.900", "GLUE"],
        ["sst2", "mine", "accuracy", "0.625", "1,500"],
        ["sst2", "w2v.txt, static vectors", "accuracy", "0.500", "1,500"],
        ["sst2", "large|one (published)", "accuracy", "0.950"],
        ["sst2", "bert-base (published)", "accuracy", "0.900"],
    ]
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert lines[0] == "| task | model | metric | mean | spread (seeds) | n | source |" and lines[1] == "|" + "---|" * 7
    assert lines[2] == "| cola | mine | accuracy | 0.500 | 0.250 to 0.750 (3) | 1,500 |  |"
    assert lines[-2] == "| sst2 | large\\|one (published) | accuracy | 0.950 |  |  |  |"
    rows = list(csv.DictReader((tmp_path / "out" / "table.csv").open()))
    assert [(row["model"], row["mean"], row["seeds"]) for row in rows[:3]] == [
        ("mine", "0.5", "3"), ("mine, random weights", "0.125", "1"), ("bert-base (published)", "0.9", "")]  # fmt: skip
    found = json.loads((tmp_path / "out" / "table.json").read_text())
    assert [float(row["mean"]) for row in rows] == [row["mean"] for row in found] and found[0]["lowest"] == 0.25
    written = (tmp_path / "out" / "report.html").read_text()
    assert "<td>0.250 to 0.750 (3)</td>" in written and "http" not in written
    assert "cola: accuracy after each epoch" in written and "by training examples" not in written


def test_numbers_of_examples_are_a_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / str(count), "cola", "m", (count / 100,), max_train_examples=count or None)
            for count in (20, 10, 40)]  # fmt: skip
    main([*map(str, runs), "--output", str(tmp_path / "out")])
    assert re.findall("cola  m +accuracy  (.*?) ", capsys.readouterr().out) == ["0.400"]
    assert "cola: accuracy by training examples" in (tmp_path / "out" / "report.html").read_text()


def test_folders_that_clash_or_say_nothing_are_refused(tmp_path: Path) -> None:
    one, other = (write_run(tmp_path / name, "cola", "m", (0.5,)) for name in "ab")
    with pytest.raises(ConfigError, match="both m on cola; name one: NAME="):
        main([str(one), str(other)])
    main([str(one), f"other={other}"])
    with pytest.raises(ConfigError, match="no metrics.json"):
        main([str(tmp_path)])
    babylm = write_run(tmp_path / "c", "cola", "other", (0.5,), definition="babylm")
    with pytest.raises(ConfigError, match="cola is judged by accuracy, babylm, in another folder by accuracy"):
        main([str(one), str(babylm)])
    (one / "metrics.json").write_text('{"task": "cola", "chosen": {}, "metric": "accuracy"}')
    with pytest.raises(DataError, match="is missing or of another type"):
        read_runs(str(one))
