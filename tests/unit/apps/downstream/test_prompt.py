"""The command: results of each seed, a second start, the table of models, and a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxlm_ds.apps.downstream.prompt import main
from ctxlm_ds.apps.evaluate.compare import read_runs
from ctxlm_ds.errors import ConfigError
from tests.downstream_models import sentiment, write_bert, write_task


def test_results_are_those_of_a_fine_tuning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bert(tmp_path / "model")
    examples = sentiment(12)[1]
    options = write_task(tmp_path, examples, examples[:8])
    (tmp_path / "prompt.yaml").write_text("pattern: '{text} a {mask} film'\nwords: {bad: bad, good: good}\n")
    command = [*options, "--prompt", str(tmp_path / "prompt.yaml"), "--model", str(tmp_path / "model"),
               "--output", str(tmp_path / "out"), "--shots", "1", "--seeds", "1", "2"]  # fmt: skip
    capsys.readouterr()  # what making the model has said
    main(command)
    shown = capsys.readouterr().out
    main(command)
    assert capsys.readouterr().out == shown and "accuracy" in shown
    (run,) = read_runs(str(tmp_path / "out"))
    assert run.place == ("model, 1 shot", "mine") and run.record["seeds"] > 1
    lines = (tmp_path / "out" / "points" / "shots1-seed2" / "dev_predictions.jsonl").read_text().splitlines()
    right = [json.loads(line)["right"] for line in lines]
    point = json.loads((tmp_path / "out" / "points" / "shots1-seed2" / "metrics.json").read_text())
    assert point["dev"]["accuracy"] == sum(right) / 8
    main([*command[:-5], "--shots", "0"])
    summary = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert [row["shots"] for row in summary["grid"]] == [0, 1]
    assert summary["method"] == ["0 shots", "1 shot"][summary["chosen"]["shots"]]
    with pytest.raises(ConfigError, match="made differently"):
        main([*command, "--calibrate"])
    with pytest.raises(ConfigError, match="--data: give the folder with the files of sst2"):
        main(["--task", "sst2", *command[4:]])
    (tmp_path / "data" / "mine.yaml").write_text((tmp_path / "mine.yaml").read_text())
    main(["--task", str(tmp_path / "data" / "mine.yaml"), *command[4:]])  # files next to it, as finetune
    assert "accuracy" in capsys.readouterr().out
