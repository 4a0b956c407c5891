"""The loop over bad batches: skipped or passed over by going back, by two ranks alike, also after a kill.

Bad batches are NaN on the last rank alone, wherever in the run they come. What the loop makes of them is compared bit
for bit with steps made by hand on the good batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds import run as run_builder
from ctxlm_ds.checkpoint.manager import CheckpointManager
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.data.stream.preview import SourceRows
from ctxlm_ds.errors import TrainingError
from ctxlm_ds.process.run_history import read_history
from ctxlm_ds.process.signals import StopSignal
from ctxlm_ds.recipe.schema import AnomaliesConfig, CheckpointConfig, RunConfig
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.hooks.hooks import Hook, Hooks, RunStart, StepMetrics
from ctxlm_ds.training.loop.recovery import Recovery
from ctxlm_ds.training.loop.saves import Saves
from ctxlm_ds.training.loop.state import TrainState
from ctxlm_ds.training.loop.trainer import Trainer
from ctxlm_ds.training.schedules.schedule import LearningRateSchedule
from tests.dist.forks import fork_ranks
from tests.dist.states import Layout, assert_same, checkpoints_of, held_by
from tests.dist.test_update import Spoiled
from tests.dist.training import GLOBAL_BATCH, build_engine, step_of

pytestmark = pytest.mark.dist
STEPS, SAVED_EVERY, RATE = 9, 3, 0.01
LAYOUTS = [Layout(2, 2, "bf16"), pytest.param(Layout(2, 1, pipeline=2), marks=pytest.mark.soak)]


class Killed(Exception):
    """Ends a run as a kill would, between two steps."""


class Stream:
    """Batch n is rows n * GLOBAL_BATCH and on; those in `bad` turn NaN on the last rank."""

    def __init__(self, engine: Engine, bad: set[int], start_row: int = 0) -> None:
        self._engine = engine
        self._bad = bad
        self._good = engine.passes.losses
        self._start_row = start_row

    def restart(self, start_row: int) -> Stream:
        self._start_row = start_row
        return self

    def __iter__(self) -> Iterator[Step]:
        number = self._start_row // GLOBAL_BATCH
        is_last = self._engine.topology.rank == self._engine.topology.world_size - 1
        while True:
            spoiled = number in self._bad and is_last
            self._engine.passes.losses = Spoiled(self._good, "nan_logits") if spoiled else self._good
            yield step_of(self._engine, number)
            number += 1


class Rows:
    """What the log asks for: here a source has its rows in order."""

    def by_source(self, first: int, count: int) -> list[SourceRows]:
        return [SourceRows("text", 0, list(range(first, first + count)))]


class Recorder(Hook):
    """Losses by step, as metrics.jsonl has them; `kill_after` going back so many times."""

    def __init__(self, kill_after: int) -> None:
        self.losses: dict[int, float] = {}
        self.back_to: list[int] = []
        self._kill_after = kill_after

    def on_step_end(self, metrics: StepMetrics) -> None:
        self.losses[metrics.step] = metrics.loss

    def on_rollback(self, step: int) -> None:
        self.losses = {number: loss for number, loss in self.losses.items() if number <= step}
        self.back_to.append(step)
        if len(self.back_to) == self._kill_after:
            raise Killed


@dataclass(frozen=True)
class Case:
    """One run."""

    action: str
    bad: tuple[int, ...] = ()
    max_skips: int = 10
    max_rollbacks: int = 3
    kill_after: int = 0


def run_case(layout: Layout, case: Case, folder: Path) -> dict[str, Any]:
    """Start, or start again, a run in a folder."""
    settings = AnomaliesConfig(
        non_finite=case.action, max_skips=case.max_skips, max_rollbacks=case.max_rollbacks, spike_window_steps=4,
        spike="skip", spike_threshold=1e6,
    )  # fmt: skip
    base = layout.config()
    config: RunConfig = base.model_copy(
        update={
            "anomalies": settings,
            "training": base.training.model_copy(update={"max_steps": STEPS}),
            "checkpoint": CheckpointConfig(interval_steps=SAVED_EVERY),
        }
    )
    engine = build_engine(config, layout.user_json())
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    checkpoints = checkpoints_of(engine, config, folder)
    manager = CheckpointManager(folder, config.checkpoint, engine.topology)

    def load() -> TrainState:
        state = checkpoints.resume(manager.find_resumable())
        if state is None:
            engine.forget_updates()
            run_builder.initialize_weights(engine)
        return state or TrainState()

    state = load()
    stream = Stream(engine, set(case.bad), state.rows_consumed)
    recorder = Recorder(case.kill_after)
    rows = Rows() if engine.topology.is_main else None
    trainer = Trainer(
        start=RunStart(state.step, config.training.max_steps, config, tokens=state.tokens), training=config.training,
        evaluation=config.evaluation, engine=engine, schedule=LearningRateSchedule(config.schedule, RATE, STEPS),
        steps=stream, validation={}, saves=Saves(config.checkpoint, checkpoints),
        recovery=Recovery(settings, folder, rows, load, stream.restart), hooks=Hooks([recorder]),
        stop_signal=StopSignal(), state=state,
    )  # fmt: skip
    error = ""
    try:
        trainer.run()
    except (TrainingError, Killed) as raised:
        error = str(raised) or "killed"
    engine.topology.all_reduce_max([0.0])
    trained = {"losses": recorder.losses, "back_to": recorder.back_to, "error": error, "state": trainer.state}
    return {**trained, "history": read_history(folder), **held_by(engine)}


def by_hand(layout: Layout, batches: list[int | None]) -> dict[str, Any]:
    """One step after another on these batches; None: a step that is passed over."""
    engine = build_engine(layout.config(), layout.user_json())
    schedule = LearningRateSchedule(engine.config.schedule, RATE, STEPS)
    losses = {
        index + 1: engine.train_step(step_of(engine, number), index, schedule.at(index)).loss
        for index, number in enumerate(batches)
        if number is not None
    }
    return {"losses": losses, **held_by(engine)}


ONE_BAD, TWO_BAD = (7,), (4, 8)
CASES = {
    "skip": Case("skip", ONE_BAD),
    "too many skips": Case("skip", (4, 5, 6), max_skips=2),
    "rollback": Case("rollback", TWO_BAD),
    "killed": Case("rollback", TWO_BAD, kill_after=2),
    "to the beginning": Case("rollback", (1,)),
    "too many rollbacks": Case("rollback", (4, 6), max_rollbacks=1),
    "stop": Case("stop", ONE_BAD),
}


def all_cases(rank: int, world_size: int, layout: Layout, folder: Path) -> dict[str, dict[str, Any]]:
    results = {name: run_case(layout, case, folder / name) for name, case in CASES.items()}
    results["started again"] = run_case(layout, Case("rollback", TWO_BAD), folder / "killed")
    results["good: skip"] = by_hand(layout, [0, 1, 2, 3, 4, 5, 6, None, 8])
    # Back from batch 4 to step 3: 3 and 4 are passed over. Back from batch 8 to step 6: batch 8 follows step 6.
    results["good: rollback"] = by_hand(layout, [0, 1, 2, 5, 6, 7, 9, 10, 11])
    results["good: to the beginning"] = by_hand(layout, [2, 3, 4, 5, 6, 7, 8, 9, 10])
    return results


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Results by rank."""
    layout: Layout = request.param
    return fork_ranks(all_cases, layout.world_size, layout, tmp_path_factory.mktemp("runs"), timeout_s=300)


def events(result: dict[str, Any]) -> list[tuple[str, int]]:
    return [(event["event"], event["step"]) for event in result["history"]]


def test_a_skipped_batch_leaves_no_trace_and_the_run_moves_on(runs: list[dict[str, dict[str, Any]]]) -> None:
    for results in runs:
        found, good = results["skip"], results["good: skip"]
        assert_same(found, good)
        assert {step: loss for step, loss in found["losses"].items() if step != 8} == good["losses"]
        assert torch.tensor(found["losses"][8]).isnan()
        state = found["state"]
        assert (state.step, state.rows_consumed) == (STEPS, STEPS * GLOBAL_BATCH)
        assert (state.skipped_steps, state.skips_in_a_row, state.rollbacks) == (1, 0, 0)
        assert state.skipped_rows == [[7 * GLOBAL_BATCH, 8 * GLOBAL_BATCH]]
        assert state.recent_losses == list(good["losses"].values())[-4:]
        assert events(found) == [("skip", 8)]
        (event,) = found["history"]
        assert event["rows"] == {
            "first": 7 * GLOBAL_BATCH, "count": GLOBAL_BATCH,
            "sources": [{"source": "text", "epoch": 0, "rows": list(range(7 * GLOBAL_BATCH, 8 * GLOBAL_BATCH))}],
        }  # fmt: skip
        assert event["loss"] is None
        assert "the loss of step 8 is nan" in event["why"]


def test_a_run_goes_back_and_passes_over_the_rows_since(runs: list[dict[str, dict[str, Any]]]) -> None:
    for results in runs:
        found, good = results["rollback"], results["good: rollback"]
        assert_same(found, good)
        assert found["losses"] == good["losses"]
        assert found["back_to"] == [3, 6]
        state = found["state"]
        assert (state.step, state.rows_consumed, state.rollbacks) == (STEPS, 12 * GLOBAL_BATCH, 2)
        assert events(found) == [("rollback", 5), ("rollback", 7)]
        passed = [[3 * GLOBAL_BATCH, 5 * GLOBAL_BATCH], [8 * GLOBAL_BATCH, 9 * GLOBAL_BATCH]]
        assert state.rolled_back_rows == passed and state.skipped_rows == []
        first, second = found["history"]
        assert (first["to_step"], second["to_step"]) == (3, 6)
        assert first["passed_over"] == {"first": 3 * GLOBAL_BATCH, "count": 2 * GLOBAL_BATCH}
        assert second["passed_over"] == {"first": 8 * GLOBAL_BATCH, "count": GLOBAL_BATCH}


def test_a_kill_after_going_back_changes_nothing(runs: list[dict[str, dict[str, Any]]]) -> None:
    for results in runs:
        assert results["killed"]["error"] == "killed"
        again, whole = results["started again"], results["rollback"]
        assert_same(again, whole)
        assert again["losses"] == {step: loss for step, loss in whole["losses"].items() if step > 6}
        states_found = [{**asdict(result["state"]), "seconds": 0.0} for result in (again, whole)]
        assert states_found[0] == states_found[1]


def test_without_a_checkpoint_it_begins_anew(runs: list[dict[str, dict[str, Any]]]) -> None:
    for results in runs:
        found = results["to the beginning"]
        assert_same(found, results["good: to the beginning"])
        assert found["losses"] == results["good: to the beginning"]["losses"]
        assert found["back_to"] == [0]
        assert events(found) == [("rollback", 2)]


@pytest.mark.parametrize(
    ("name", "happened", "why"),
    [
        ("too many skips", [("skip", 5), ("skip", 6), ("anomaly", 7)], "2 steps in a row were skipped before it"),
        ("too many rollbacks", [("rollback", 5), ("anomaly", 5)], "the run went back 1 times before it"),
        ("stop", [("anomaly", 8)], "the loss of step 8 is nan"),
    ],
)
def test_the_limits_stop_every_rank(
    runs: list[dict[str, dict[str, Any]]], name: str, happened: list[tuple[str, int]], why: str
) -> None:
    for results in runs:
        assert events(results[name]) == happened
        assert why in results[name]["error"]
        assert results[name]["history"][-1]["rows"]["count"] == GLOBAL_BATCH
        assert all(weight.isfinite().all() for weight in results[name]["weights"].values())
