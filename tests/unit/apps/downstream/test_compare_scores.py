"""One table of several output folders: spread, published scores, what is missing, curves, and folders that clash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.downstream.compare_scores import main, read_run
from ctxlm_ds.errors import ConfigError, DataError


def write_run(folder: Path, task: str, model: str, values: tuple[float, ...], **more: Any) -> Path:
    folder.mkdir(parents=True)
    point = {"batch_size": 8, "learning_rate": 1e-3, "epochs": 2.0}
    spread = {"median": sorted(values)[len(values) // 2], "lowest": min(values), "highest": max(values)}
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
        write_run(tmp_path / "a", "cola", "runs/mine/hf", (0.25, 0.5, 0.75)),
        write_run(tmp_path / "b", "cola", "runs/mine/hf", (0.125,), random=True),
        write_run(tmp_path / "c", "sst2", "runs/mine/hf", (0.625,), published={"large|one": 0.95}),
        write_run(tmp_path / "d", "sst2", "runs/mine/hf", (0.5,), max_train_examples=100),
        write_run(tmp_path / "e", "sst2", "w2v.txt", (0.5,), method="static vectors"),
    ]
    main([*map(str, runs), "--output", str(tmp_path / "out")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "| model | cola, accuracy | sst2, accuracy |",
        "|---|---|---|",
        "| mine | 0.500 (0.250 to 0.750; 3 seeds; n 1,500) | 0.625 (1 seed; n 1,500) |",
        "| mine, random weights | 0.125 (1 seed; n 1,500) | – |",
        "| w2v.txt, static vectors | – | 0.500 (1 seed; n 1,500) |",
        "| bert-base (published) | 0.900 | 0.900 |",
        "| large\\|one (published) | – | 0.950 |",
    ]
    assert (tmp_path / "out" / "scores.md").read_text().splitlines() == lines
    written = (tmp_path / "out" / "scores.html").read_text()
    assert "<td>0.500 (0.250 to 0.750; 3 seeds; n 1,500)</td>" in written and "http" not in written
    assert "cola: accuracy after each epoch" in written and "by training examples" not in written


def test_numbers_of_examples_are_a_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / str(count), "cola", "m", (count / 100,), max_train_examples=count or None)
            for count in (20, 10, 40)]  # fmt: skip
    main([*map(str, runs), "--output", str(tmp_path / "out")])
    assert "| m | 0.400 (1 seed; n 1,500) |" in capsys.readouterr().out
    assert "cola: accuracy by training examples" in (tmp_path / "out" / "scores.html").read_text()


def test_folders_that_clash_or_say_nothing_are_refused(tmp_path: Path) -> None:
    one, other = (write_run(tmp_path / name, "cola", "m", (0.5,)) for name in "ab")
    with pytest.raises(ConfigError, match="both m on cola; name one: NAME="):
        main([str(one), str(other)])
    main([str(one), f"other={other}"])
    with pytest.raises(ConfigError, match="no metrics.json"):
        main([str(tmp_path)])
    (one / "metrics.json").write_text('{"task": "cola", "chosen": {}, "metric": "accuracy"}')
    with pytest.raises(DataError, match="is missing or of another type"):
        read_run(str(one))
