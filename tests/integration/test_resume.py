"""Kill -9 at random moments, start again with the same command: the loss curve is bitwise that of no interruption."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest

from ctxlm_ds.process.run_history import START, read_history
from tests.integration.conftest import Prepared
from tests.integration.route import call, kill_group, last_step, launcher, metrics, pretrain_words, start, wait_for

STEPS = 24


def words(route: Prepared, folder: Path, kind: str, ranks: int, stage: int, *overrides: str) -> list[object]:
    recipe = route.recipe(
        folder / "recipe.yaml", training={"max_steps": STEPS}, checkpoint={"interval_steps": 3, "keep_last": 2},
        evaluation={"interval_steps": 10},
    )  # fmt: skip
    return [*launcher(kind, ranks), *pretrain_words(recipe, [f"run_dir={folder / 'run'}", *overrides], stage)]


def test_killed_at_random_moments(bert_route: Prepared, tmp_path: Path) -> None:
    """Two ranks under ZeRO-2 with dropout; kills fall while training and while saving."""
    (tmp_path / "whole").mkdir()
    call(*words(bert_route, tmp_path / "whole", "forked", 2, 2))
    command = words(bert_route, tmp_path, "forked", 2, 2)
    run_dir = tmp_path / "run"
    drawn = random.Random(7)
    for _ in range(3):
        process = start(command, tmp_path / "log")
        before = last_step(run_dir)
        wait_for(lambda b=before: last_step(run_dir) > b, 120, "a step")
        time.sleep(drawn.uniform(0.0, 0.6))
        kill_group(process)
    call(*command)
    for key in ("loss", "grad_norm", "eval/heldout/loss"):
        assert metrics(run_dir, key) == metrics(tmp_path / "whole" / "run", key), key


def test_a_stop_signal_saves_and_the_next_start_goes_on(bert_route: Prepared, tmp_path: Path) -> None:
    command = words(bert_route, tmp_path, "forked", 1, 2)
    process = start(command, tmp_path / "log")
    wait_for(lambda: last_step(tmp_path / "run") >= 4, 120, "a few steps")
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    stopped_at = last_step(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / f"step-{stopped_at:08d}").exists()
    call(*words(bert_route, tmp_path, "forked", 1, 2))
    assert sorted(metrics(tmp_path / "run")) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_ranks_that_share_rows_go_on_from_and_to_one(bert_route: Prepared, tmp_path: Path, ranks: int) -> None:
    """Ranks that end early, then one, then the ranks again: the losses are those of one alone."""
    shared, one, turns = "parallel.context_parallel_size=2", tmp_path / "one", tmp_path / "turns"
    ends = [(f"training.max_steps={steps}", "schedule.total_steps=6") for steps in (2, 4, 6)]
    for folder in (one, turns):
        folder.mkdir()
    call(*words(bert_route, one, "forked", 1, 1, *ends[2], "evaluation.interval_steps=3"))
    call(*words(bert_route, turns, "forked", ranks, 1, *ends[0], shared))
    alone = call(*words(bert_route, turns, "forked", 1, 1, *ends[1]))
    assert re.search(r"resuming exactly, but not bitwise: .*\bcontext_parallel_size 2 -> 1\b", alone.stderr)
    call(*words(bert_route, turns, "forked", ranks, 2, *ends[2], shared, "evaluation.interval_steps=3"))
    events = [event for event in read_history(turns / "run") if event["event"] == START]
    assert [event["environment"]["context_parallel_size"] for event in events] == [2, 1, 2]
    for key in ("loss", "grad_norm", "eval/heldout/loss"):
        found, wanted = (metrics(folder / "run", key) for folder in (turns, one))
        assert 6 in wanted and [found[step] for step in wanted if step in found] == pytest.approx(
            [loss for step, loss in wanted.items() if step in found], rel=1e-5
        )


def test_changed_settings_are_reported_or_refused(bert_route: Prepared, tmp_path: Path) -> None:
    """A changed curve is logged and recorded, and the recipe of before is kept; another seed is refused."""
    call(*words(bert_route, tmp_path, "forked", 1, 1, "training.max_steps=6"))
    first_recipe = (tmp_path / "run" / "config.yaml").read_text()
    changed = ("training.max_steps=8", "optimizer.weight_decay=0.2", "training.global_batch_size=4")
    done = call(*words(bert_route, tmp_path, "forked", 1, 1, *changed, "training.micro_batch_size=4"))
    assert "this resume changes the training" in done.stderr and "resuming exactly" not in done.stderr
    assert re.search(r"resuming \S+/run at step 6 of 8\n", done.stderr)
    assert re.search(r"  optimizer.weight_decay 0.01 -> 0.2\n", done.stderr)
    assert (tmp_path / "run" / "config-until-step-00000006.yaml").read_text() == first_recipe
    events = [event for event in read_history(tmp_path / "run") if event["event"] == START]
    assert "changed_settings" not in events[0]
    assert set(events[1]["changed_settings"]) >= {
        "training.max_steps 6 -> 8", "training.global_batch_size 8 -> 4", "optimizer.weight_decay 0.01 -> 0.2",
    }  # fmt: skip
    done = call(*words(bert_route, tmp_path, "forked", 1, 1, "training.seed=99"), check=False)
    assert done.returncode == 2
    assert "training.seed" in done.stderr and "99" in done.stderr and "initialize_from" in done.stderr
