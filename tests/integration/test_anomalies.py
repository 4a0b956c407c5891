"""Bad batches in real runs: the run goes back and past them, a kill changes nothing, the rows on record are the rows.

The spikes are real ones: at a learning rate that is too high, losses of step 16 and later jump by several deviations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.process.run_history import ANOMALY, ROLLBACK, SKIP, read_history
from tests.integration.conftest import Prepared
from tests.integration.route import call, kill_group, launcher, metrics, pretrain_words, start, tool, wait_for

STEPS = 24
BATCH = 8
SPIKES = (
    "anomalies.spike_threshold=2", "anomalies.spike_window_steps=5", "anomalies.max_rollbacks=99",
    "anomalies.max_skips=99",
    "optimizer.learning_rate=0.01", "schedule.warmup_steps=0", "schedule.name=constant",
)  # fmt: skip


def words(route: Prepared, folder: Path, kind: str, ranks: int, *overrides: str, stage: int = 2) -> list[object]:
    recipe = route.recipe(
        folder / "recipe.yaml", training={"max_steps": STEPS}, checkpoint={"interval_steps": 5},
        evaluation={"interval_steps": 10},
    )  # fmt: skip
    return [*launcher(kind, ranks), *pretrain_words(recipe, [f"run_dir={folder / 'run'}", *overrides], stage)]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_history(run_dir) if event["event"] == kind]


def last_state(run_dir: Path) -> dict[str, Any]:
    """What the last checkpoint holds beside the weights, without times."""
    state = json.loads((run_dir / "checkpoints" / f"step-{STEPS:08d}" / "state.json").read_text())["train_state"]
    return {name: value for name, value in state.items() if name != "seconds"}


CASES = [
    ("rollback", "forked", 1, ()),
    pytest.param("rollback", "forked", 2, (), marks=pytest.mark.soak),
    pytest.param("skip", "forked", 2, (), marks=pytest.mark.soak),
    pytest.param("rollback", "forked", 2, ("checkpoint.overlap=false",), marks=pytest.mark.soak),
    pytest.param(
        "rollback", "forked", 3, ("parallel.pipeline_parallel_size=3", "model.num_layers=3"), marks=pytest.mark.soak
    ),
    pytest.param("rollback", "forked", 2, ("parallel.tensor_parallel_size=2",), marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("action", "kind", "ranks", "layout"), CASES)
def test_a_kill_after_a_bad_batch_changes_nothing(
    bert_route: Prepared, tmp_path: Path, action: str, kind: str, ranks: int, layout: tuple[str, ...]
) -> None:
    event = {"rollback": ROLLBACK, "skip": SKIP}[action]
    stage = 1 if "pipeline" in str(layout) else 2
    settings = (f"anomalies.spike={action}", *SPIKES, *layout)
    whole = tmp_path / "whole"
    whole.mkdir()
    call(*words(bert_route, whole, kind, ranks, *settings, stage=stage))
    assert events(whole / "run", event)

    command = words(bert_route, tmp_path, kind, ranks, *settings, stage=stage)
    process = start(command, tmp_path / "log")
    wait_for(lambda: events(tmp_path / "run", event), 120, f"a {event}")
    kill_group(process)
    call(*command)
    for key in ("loss", "grad_norm", "eval/heldout/loss"):
        assert metrics(tmp_path / "run", key) == metrics(whole / "run", key)
    assert sorted(metrics(whole / "run")) == list(range(1, STEPS + 1))
    state = last_state(whole / "run")
    assert last_state(tmp_path / "run") == state
    if action == "skip":
        assert state["skipped_steps"] == len(events(whole / "run", SKIP))
        assert state["rows_consumed"] == STEPS * BATCH
    else:
        assert state["rollbacks"] == len(events(whole / "run", ROLLBACK))
        assert state["rows_consumed"] > STEPS * BATCH


def test_without_a_checkpoint_it_goes_back_to_the_beginning_and_then_stops(
    bert_route: Prepared, tmp_path: Path
) -> None:
    """A decay that multiplies every weight by about -1e6 per step makes the third loss NaN, whatever the batch."""
    settings = ("optimizer.learning_rate=1000", "optimizer.weight_decay=1000", "schedule.warmup_steps=0",
                "anomalies.non_finite=rollback", "anomalies.max_rollbacks=1")  # fmt: skip
    done = call(*words(bert_route, tmp_path, "forked", 1, *settings), check=False)
    assert done.returncode == 3
    (back,) = events(tmp_path / "run", ROLLBACK)
    (stop,) = events(tmp_path / "run", ANOMALY)
    assert (back["step"], back["to_step"], back["loss"]) == (3, 0, None)
    assert back["passed_over"] == {"first": 0, "count": 3 * BATCH}
    assert (stop["step"], stop["rows"]["first"], stop["rows"]["count"]) == (3, 5 * BATCH, BATCH)
    assert "the loss of step 3 is nan" in done.stderr
    assert "the run went back 1 times before it (anomalies.max_rollbacks)" in done.stderr
    assert "rows 40 to 47 of the training stream: train_text_sentence epoch 0 rows" in done.stderr
    assert sorted(metrics(tmp_path / "run")) == [1, 2]

    (source,) = stop["rows"]["sources"]
    shown = tool("show_batch.py", tmp_path / "run", "--step", 3, "--count", 3).stdout
    for place, row in enumerate(source["rows"][:3]):
        assert f"position {40 + place}: train_text_sentence row {row} in epoch 0" in shown
    assert "position 43" not in shown
    assert shown.count("[CLS] ") == 3
