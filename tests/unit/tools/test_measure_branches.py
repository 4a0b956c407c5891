"""Tables of runs that are complete: nothing starts, and each figure is of its run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxlm_ds.recipe.load import load_config
from tools.measure_branches import EMA_LOSS, LOSS, Measured, averages, decays, growth


def complete(folder: Path, **losses: list[float]) -> Measured:
    """A folder in which these runs have ended, with these held-out losses."""
    runs = Measured(folder, "train_text_sentence", "heldout_text_sentence", "tok", 100)
    for name, values in losses.items():
        run = folder / name.replace("_", "-")
        run.mkdir()
        (run / "status.json").write_text(json.dumps({"state": "completed"}))
        both = (LOSS, EMA_LOSS)
        lines = [json.dumps({"step": step, **dict.fromkeys(both, value)}) for step, value in enumerate(values)]
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return runs


DECAYS = {"trunk": [5.0], "decay_25": [4.5], "decay_50": [4.0], "decay_100": [3.0],
          "cosine_25": [4.6], "cosine_50": [4.1], "cosine_100": [3.1]}  # fmt: skip


def test_the_recipe_is_valid_and_a_run_that_has_not_ended_is_not_complete(tmp_path: Path) -> None:
    runs = complete(tmp_path, trunk=[5.0, 4.0])
    config = load_config(runs.recipe)
    assert config.training.max_steps == 100 and config.schedule.warmup_steps == 2 and not config.phases
    assert runs.is_complete("trunk") and runs.losses("trunk") == [5.0, 4.0] and not runs.is_complete("other")
    (tmp_path / "trunk" / "status.json").write_text('{"state": "stopped"}')
    assert not runs.is_complete("trunk")


def test_each_decay_is_next_to_the_cosine_of_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.measure_branches.run_step", lambda *words: pytest.fail(f"started {words}"))
    rows = decays(complete(tmp_path, **DECAYS))
    assert [row[0] for row in rows[1:]] == ["25", "50", "100"]
    assert rows[1][1:] == ("4.5000", "4.6000", "5", "25") and rows[3][1:] == ("3.0000", "3.1000", "20", "100")


def test_a_mean_has_the_loss_at_step_0(tmp_path: Path) -> None:
    means = {f"loss_{name}_mean": [2.5, 9.0] for name in ("trunk", "decay_100", "cosine_100")}
    runs = complete(tmp_path, **DECAYS, **means)
    for name in ("trunk", "decay-100", "cosine-100"):
        (tmp_path / f"{name}-mean").mkdir()
    losses = (("5.0000", "2.5000", "5.0000"), ("3.0000", "2.5000", "3.0000"), ("3.1000", "2.5000", "3.1000"))
    assert [row[1:] for row in averages(runs)[1:]] == list(losses)


def test_growth_compares_equal_steps(tmp_path: Path) -> None:
    (tmp_path / "grown").mkdir()
    rows = growth(complete(tmp_path, small=[4.0], large_grown=[6.0, 3.5, 3.0], large_random=[3.9, 3.4]))
    assert rows[1] == ("grown", "6.0000", "3.5000", "3.0000") and rows[2] == ("random", "-", "3.9000", "3.4000")
