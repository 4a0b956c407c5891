"""Kill -9 at random moments, start again with the same command: the loss curve is bitwise that of no interruption."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ctxlm_ds.process.run_history import START, read_history
from tests.integration.conftest import Prepared
from tests.integration.route import call, kill_group, launcher, metrics, pretrain_words, start, tool, wait_for

STEPS = 24


def words(route: Prepared, folder: Path, kind: str, ranks: int, stage: int, *overrides: str) -> list[object]:
    recipe = route.recipe(
        folder / "recipe.yaml", training={"max_steps": STEPS}, checkpoint={"interval_steps": 3, "keep_last": 2},
        evaluation={"interval_steps": 10},
    )  # fmt: skip
    return [*launcher(kind, ranks), *pretrain_words(recipe, [f"run_dir={folder / 'run'}", *overrides], stage)]


@pytest.fixture(scope="module")
def uninterrupted(bert_route: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    call(*words(bert_route, folder, "forked", 2, 2))
    return folder / "run"


def test_killed_at_random_moments(uninterrupted: Path, bert_route: Prepared, tmp_path: Path) -> None:
    """Two ranks under ZeRO-2 with dropout; kills fall while training and while saving."""
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
    assert metrics(run_dir) == metrics(uninterrupted)
    assert metrics(run_dir, "grad_norm") == metrics(uninterrupted, "grad_norm")
    assert metrics(run_dir, "eval/heldout/loss") == metrics(uninterrupted, "eval/heldout/loss")


def last_step(run_dir: Path) -> int:
    try:
        return max(metrics(run_dir), default=0)
    except (FileNotFoundError, ValueError):
        return 0


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


def test_ranks_that_share_rows_go_on_from_and_to_one(bert_route: Prepared, tmp_path: Path) -> None:
    """Two ranks that are stopped, then one, then two again; and four: the losses and the model are those of one."""
    long, half = ("training.max_steps=9", "schedule.total_steps=9"), ("training.max_steps=3", "schedule.total_steps=9")
    then = ("training.max_steps=6", "schedule.total_steps=9")
    shared = "parallel.context_parallel_size=2"
    folders = {name: tmp_path / name for name in ("one", "turns", "four")}
    for folder in folders.values():
        folder.mkdir()
    call(*words(bert_route, folders["one"], "forked", 1, 1, *long))
    call(*words(bert_route, folders["turns"], "forked", 2, 1, *half, shared))
    alone = call(*words(bert_route, folders["turns"], "forked", 1, 1, *then))
    assert re.search(r"resuming exactly, but not bitwise: .*\bcontext_parallel_size 2 -> 1\b", alone.stderr)
    call(*words(bert_route, folders["turns"], "forked", 2, 2, *long, shared))
    call(*words(bert_route, folders["four"], "forked", 4, 1, *long, shared))
    weights = {}
    for name, folder in folders.items():
        tool("convert_checkpoint.py", "to-hf", "--checkpoint", folder / "run", "--output", folder / "hf")
        weights[name] = load_file(folder / "hf" / "model.safetensors")
    for name in ("turns", "four"):
        for key in ("loss", "grad_norm", "eval/heldout/loss"):
            found, wanted = (metrics(folders[of] / "run", key) for of in (name, "one"))
            assert {step: found[step] for step in wanted} == pytest.approx(wanted, rel=1e-5)
        for parameter, weight in weights["one"].items():
            torch.testing.assert_close(weights[name][parameter], weight, rtol=1e-3, atol=1e-4, msg=parameter)
    assert "context" in (folders["four"] / "run" / "report.html").read_text()


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
