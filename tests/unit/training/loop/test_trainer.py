"""The loop over a real engine: when it stops, evaluates and saves, and that all ranks do so together."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.errors import DataError, TrainingError
from ctxlm_ds.process.signals import STOP_SIGNALS, StopSignal
from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.schema import CheckpointConfig, EvaluationConfig, RunConfig, TrainingConfig
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.hooks.hooks import Hook, Hooks, RunEnd, RunStart, StepMetrics
from ctxlm_ds.training.loop import trainer as trainer_module
from ctxlm_ds.training.loop.recovery import Recovery
from ctxlm_ds.training.loop.saves import Saves
from ctxlm_ds.training.loop.state import TrainState
from ctxlm_ds.training.loop.trainer import Trainer
from ctxlm_ds.training.schedules.schedule import LearningRateSchedule
from tests.dist.forks import fork_ranks
from tests.dist.training import GLOBAL_BATCH, build_engine, global_batch, slice_batch, step_for_rank, tiny_config
from tests.savers import RecordingSaver

pytestmark = pytest.mark.dist
MICRO = 4
Action = Callable[[int], None]


class Recorder(Hook):
    """What happened, in order; `on_step` may act after a step."""

    def __init__(self, on_step: Action | None = None) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.end: RunEnd | None = None
        self._on_step = on_step

    def on_step_end(self, metrics: StepMetrics) -> None:
        self.events.append(("step", metrics.step, metrics.learning_rate, metrics.tokens))
        if self._on_step is not None:
            self._on_step(metrics.step)

    def on_evaluation(self, step: int, figures: Any) -> None:
        self.events.append(("evaluation", step, figures["eval/held_out/loss"]))

    def on_run_end(self, end: RunEnd) -> None:
        self.end = end


def config_of(
    max_steps: int = 5,
    evaluate: int = 100,
    save: int = 100,
    minutes: float | None = None,
    dropout: float = 0.0,
    **limits: Any,
) -> RunConfig:
    training = TrainingConfig(
        global_batch_size=GLOBAL_BATCH, micro_batch_size=MICRO, precision="fp32", max_steps=max_steps, **limits
    )
    return tiny_config(
        dropout=dropout, training=training, evaluation=EvaluationConfig(interval_steps=evaluate),
        # Less than a recipe may have, so that a save is due after each step.
        checkpoint=CheckpointConfig(interval_steps=save).model_copy(update={"interval_minutes": minutes}),
        schedule=choices.SCHEDULE.make(name="linear", warmup_steps=2),
    )  # fmt: skip


def steps_from(start: int, rank: int, world_size: int) -> Iterator[Step]:
    return (step_for_rank(step, MICRO, rank, world_size) for step in itertools.count(start))


def nothing_bad(*_: object) -> NoReturn:
    raise AssertionError("no batch of these runs is bad")


def run_trainer(
    engine: Engine,
    config: RunConfig,
    state: TrainState | None = None,
    on_step: Action | None = None,
    steps: Iterator[Step] | None = None,
    stopped: bool = False,
    phase_hours: float | None = None,
    is_last_phase: bool = True,
) -> dict[str, Any]:
    """One run to its end: its events, how it ended, and the error if there was one.

    With `stopped`, SIGTERM came before it began.
    """
    topology = engine.topology
    stop_signal = StopSignal()
    recorder = Recorder(on_step)
    state = state or TrainState()
    place = (topology.rank, topology.world_size)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop_signal.install()
    stop_signal.requested, stop_signal.name = stopped, "SIGTERM" if stopped else None
    held_out = slice_batch(global_batch(99), MICRO * topology.rank, MICRO * (topology.rank + 1))
    trainer = Trainer(
        start=RunStart(state.step, config.training.max_steps, config, tokens=state.tokens), training=config.training,
        evaluation=config.evaluation, engine=engine,
        schedule=LearningRateSchedule(config.schedule, config.optimizer.learning_rate, config.training.max_steps),
        steps=steps or steps_from(state.step, *place), validation={"held_out": [held_out]},
        saves=Saves(config.checkpoint, RecordingSaver(lambda step: recorder.events.append(("save", step)))),
        recovery=Recovery(config.anomalies, Path(), None, nothing_bad, nothing_bad),
        hooks=Hooks([recorder]), stop_signal=stop_signal, state=state, phase_hours=phase_hours,
        is_last_phase=is_last_phase,
    )  # fmt: skip
    error = None
    try:
        trainer.run()
    except DataError as raised:
        error = str(raised)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return {"events": recorder.events, "end": recorder.end, "error": error, "state": state}


def steps_of(result: dict[str, Any], kind: str) -> list[int]:
    return [event[1] for event in result["events"] if event[0] == kind]


def failing(steps: Iterator[Step]) -> Iterator[Step]:
    yield from itertools.islice(steps, 2)
    raise DataError("a row cannot be read")


def all_runs(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Several runs, one after another over one engine: building it is what takes time."""
    engine = build_engine(config_of(), {"zero_optimization": {"stage": 1}})

    def terminate(at_step: int) -> Action:
        def act(step: int) -> None:
            if step == at_step and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        return act

    from_weights = config_of(2).model_copy(update={"initialize_from": "weights"})
    two_steps = sum(global_batch(step).num_tokens for step in range(2))
    return {
        "intervals": run_trainer(engine, config_of(5, evaluate=2, save=3)),
        "tokens": run_trainer(engine, config_of(50, max_tokens=two_steps)),
        "hours": run_trainer(engine, config_of(50, max_hours=1e-9)),
        "minutes": run_trainer(engine, config_of(3, minutes=1e-9)),
        "signal": run_trainer(engine, config_of(50), on_step=terminate(2)),
        "signal before an evaluation": run_trainer(engine, config_of(50, evaluate=3), on_step=terminate(2)),
        "signal in the last step of a phase": run_trainer(
            engine, config_of(3), on_step=terminate(2), is_last_phase=False
        ),
        "late signal": run_trainer(engine, config_of(2), on_step=terminate(2)),
        "resumed": run_trainer(engine, config_of(5), TrainState(step=4, rows_consumed=64, tokens=9, seconds=2.0)),
        "complete": run_trainer(engine, config_of(5), TrainState(step=5, rows_consumed=80)),
        "spent": run_trainer(engine, config_of(50), TrainState(step=5, seconds=3600.0), phase_hours=1),
        "weights": run_trainer(engine, from_weights),
        "stopped": run_trainer(engine, from_weights, stopped=rank == 1),
        **until_hours(engine, rank),
        "error": run_trainer(engine, config_of(50), steps=failing(steps_from(0, rank, world_size))),
    }


WSD = choices.SCHEDULE.make(name="wsd", warmup_steps=2, decay_fraction=0.4, until_hours=10 / 3600)


class Clock:
    """Time that passes between steps alone, on rank 0; the other ranks' clocks stand still."""

    def __init__(self, rank: int, seconds: float) -> None:
        self.now, self._seconds = 0.0, seconds * (rank == 0)

    def monotonic(self) -> float:
        return self.now

    def tick(self, step: int) -> None:
        self.now += self._seconds


def until_hours(engine: Engine, rank: int) -> dict[str, dict[str, Any]]:
    """10 seconds with a step in each, the steps from the eighth on again, and a warmup that is too long."""
    found, real = {}, trainer_module.time
    config = config_of(50).model_copy(update={"schedule": WSD})
    slow = config.with_values("schedule", warmup_steps=20)
    planned = TrainState(step=8, decay=[7, 11], seconds=1.0)
    for name, used, state, seconds in (
        ("budget", config, None, 1.0), ("planned", config, planned, 0.1), ("short", slow, None, 1.0),
    ):  # fmt: skip
        clock = trainer_module.time = Clock(rank, seconds)
        try:
            found[name] = run_trainer(engine, used, state, clock.tick)
        except TrainingError as error:
            found[name] = {"error": str(error)}
        finally:
            trainer_module.time = real
    return found


@pytest.fixture(scope="module")
def runs() -> list[dict[str, dict[str, Any]]]:
    """Results by rank."""
    return fork_ranks(all_runs, 2, timeout_s=60)


def test_intervals_and_the_end(runs: list[dict[str, dict[str, Any]]]) -> None:
    for rank in runs:
        result = rank["intervals"]
        kinds = [event[:2] for event in result["events"]]
        assert kinds == [
            ("step", 1), ("step", 2), ("evaluation", 2), ("step", 3), ("save", 3), ("step", 4), ("evaluation", 4),
            ("step", 5), ("evaluation", 5), ("save", 5),
        ]  # fmt: skip
        rates = [event[2] for event in result["events"] if event[0] == "step"]
        assert rates == pytest.approx([0.0, 0.005, 0.01, 0.01 * 2 / 3, 0.01 / 3])
        assert result["end"].reason == "training.max_steps (5) reached"
        assert result["end"].completed
        assert result["state"].rows_consumed == 5 * GLOBAL_BATCH
    assert runs[0]["intervals"]["events"] == runs[1]["intervals"]["events"]


def test_the_weights_of_a_start_are_evaluated_unless_it_stops(runs: list[dict[str, dict[str, Any]]]) -> None:
    for rank in runs:
        kinds = [event[:2] for event in rank["weights"]["events"]]
        assert kinds == [("evaluation", 0), ("step", 1), ("step", 2), ("evaluation", 2), ("save", 2)]
        assert rank["stopped"]["events"] == []
        assert (rank["stopped"]["end"].signal_number, rank["weights"]["end"].signal_number) == (signal.SIGTERM, 0)
        assert rank["signal"]["end"].signal_number == signal.SIGTERM


def test_a_signal_saves_first(runs: list[dict[str, dict[str, Any]]]) -> None:
    """An evaluation may take longer than the notice; a run that is stopped between two phases is not over."""
    for rank in runs:
        for name in ("signal before an evaluation", "signal in the last step of a phase"):
            end = rank[name]["end"]
            kinds = [event[:2] for event in rank[name]["events"]]
            assert kinds == [("step", 1), ("step", 2), ("step", 3), ("save", 3), ("evaluation", 3)]
            assert (end.signal_number, end.completed, end.phase_over) == (signal.SIGTERM, False, False)


@pytest.mark.parametrize(
    ("name", "steps", "evaluations", "saves", "completed", "reason"),
    [
        ("tokens", [1, 2], [2], [2], True, "training.max_tokens"),  # those of all ranks count
        ("hours", [1], [1], [1], False, "training.max_hours"),
        ("minutes", [1, 2, 3], [3], [1, 2, 3], True, "training.max_steps"),
        # It comes on one rank after step 2 was agreed on; there is no time for an evaluation.
        ("signal", [1, 2, 3], [], [3], False, "stopped by signal SIGTERM"),
        ("late signal", [1, 2], [2], [2], True, ""),  # both evaluate: an evaluation is a collective
        ("complete", [], [], [], True, ""),
        ("spent", [], [], [], True, "phases[0].hours (1) reached"),  # a restart trains no further step
        ("error", [1, 2], [], [], False, "an error"),
    ],
)
def test_how_a_run_ends(
    runs: list[dict[str, dict[str, Any]]], name: str, steps: list[int], evaluations: list[int], saves: list[int],
    completed: bool, reason: str,
) -> None:  # fmt: skip
    for result in (rank[name] for rank in runs):
        assert [steps_of(result, kind) for kind in ("step", "evaluation", "save")] == [steps, evaluations, saves]
        assert result["end"].completed == completed and reason in result["end"].reason
        assert result["error"] == ("a row cannot be read" if name == "error" else None)


def test_a_decay_by_wall_time_ends_the_run(runs: list[dict[str, dict[str, Any]]]) -> None:
    """After 7 steps 6 s are over, 60 % of 10 s; at that speed 4 more steps fit. All ranks follow rank 0's clock."""
    for rank in runs:
        rates, resumed = ([event[2] for event in rank[name]["events"] if event[0] == "step"]
                          for name in ("budget", "planned"))  # fmt: skip
        assert rates == pytest.approx([0.0, 0.005, *[0.01] * 6, 0.0075, 0.005, 0.0025])
        assert rank["budget"]["state"].decay == [7, 11]
        assert (rank["budget"]["end"].reason, rank["budget"]["end"].completed) == (
            "schedule.until_hours (0.00277778) reached", True,
        )  # fmt: skip
        assert resumed == rates[8:] and rank["planned"]["end"].completed
        assert "7 of 20 steps of warmup fit before the decay" in rank["short"]["error"]


def test_a_resumed_run_goes_on_from_its_state(runs: list[dict[str, dict[str, Any]]]) -> None:
    for rank in runs:
        result = rank["resumed"]
        assert [event[:3] for event in result["events"][:1]] == [("step", 5, pytest.approx(0.01 / 3))]
        state = result["state"]
        tokens = 9 + global_batch(4).num_tokens
        assert (state.step, state.rows_consumed, state.tokens) == (5, 80, tokens)
        assert state.seconds > 2.0


def losses_with(rank: int, world_size: int, evaluate: bool) -> tuple[list[float], list[float]]:
    """Training losses under ZeRO 3 with dropout, and the held-out losses in between, each taken twice."""
    config = config_of(dropout=0.1)
    engine = build_engine(config, {"zero_optimization": {"stage": 3}})
    held_out = [slice_batch(global_batch(99), MICRO * rank, MICRO * (rank + 1))]
    trained, evaluated = [], []
    for step in range(3):
        trained.append(engine.train_step(step_for_rank(step, MICRO, rank, world_size), step, 0.01).loss)
        if evaluate:
            evaluated += [engine.evaluate(held_out)["loss"] for _ in range(2)]
    return trained, evaluated


def test_an_evaluation_changes_nothing_and_drops_nothing_out() -> None:
    (trained, evaluated), _ = fork_ranks(losses_with, 2, True, timeout_s=60)
    (alone, _), _ = fork_ranks(losses_with, 2, False, timeout_s=60)
    assert trained == alone
    assert evaluated[::2] == evaluated[1::2]
    assert len(set(evaluated)) == 3


def imported_files(rank: int, world_size: int) -> list[str]:
    """Files of the package that the trainer imports where only its libraries were imported before."""
    for name in [name for name in sys.modules if name.startswith("ctxlm_ds")]:
        del sys.modules[name]
    import_module("ctxlm_ds.training.loop.trainer")
    return [str(module.__file__) for name, module in sys.modules.items() if name.startswith("ctxlm_ds")]


def test_importing_the_trainer_executes_few_files_of_the_package() -> None:
    (imported,) = fork_ranks(imported_files, 1)
    assert 10 < len([path for path in imported if not path.endswith("__init__.py")]) <= 60
