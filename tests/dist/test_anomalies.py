"""A refused update leaves no trace in any layout; a run goes back to a checkpoint while it lives as a new process does.

States are compared bit for bit: weights, moments, counters, the loss scale, and the steps that follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds import run as run_builder
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.loop.state import Anomaly, StepResult, TrainState
from tests.dist.runner import run_ranks
from tests.dist.states import Layout, assert_same, held_by, resume_newest, save_at
from tests.dist.test_update import Spoiled, allow_fp16
from tests.dist.training import build_engine, step_of

pytestmark = pytest.mark.dist
RATE = 0.01
BAD = 2
"""The first step that is refused."""
Make = Callable[[], Engine]
SPIKE = Anomaly("spike", "the test says so")

LAYOUTS = [
    Layout(2, 3), Layout(2, 2, "bf16", offload=True),
    Layout(2, 1, "bf16", tensor=2), Layout(2, 1, pipeline=2), Layout(2, 2, "bf16", context=2),
]  # fmt: skip
SOAK_LAYOUTS = [
    Layout(2, 0), Layout(2, 1, context=2), Layout(1, 0), Layout(2, 1), Layout(2, 2), Layout(2, 1, "bf16"),
    Layout(2, 3, "bf16"), Layout(2, 2, "bf16"), Layout(2, 2, offload=True), Layout(2, 3, offload=True),
    Layout(2, 1, "bf16", offload=True), Layout(2, 3, "bf16", offload=True),
    Layout(2, 1, "fp16"), Layout(2, 2, "fp16"), Layout(2, 2, "fp16", offload=True), Layout(2, 3, "fp16"),
    Layout(2, 3, "fp16", offload=True), Layout(2, 0, tensor=2), Layout(4, 3, tensor=2), Layout(4, 2, tensor=2),
    Layout(2, 0, pipeline=2), Layout(2, 1, "bf16", pipeline=2), Layout(4, 1, "bf16", tensor=2, pipeline=2),
    Layout(2, 0, context=2), Layout(2, 3, context=2), Layout(2, 1, "fp16", context=2), Layout(2, 3, "fp16", context=2),
    Layout(4, 1, "bf16", context=2, pipeline=2),
]  # fmt: skip


def some(chosen: list[Layout]) -> list[Any]:
    """Every layout; those that are not chosen belong to the soak."""
    return [
        pytest.param(layout, marks=() if layout in chosen else pytest.mark.soak) for layout in LAYOUTS + SOAK_LAYOUTS
    ]


def maker(layout: Layout, optimizer: str = "adamw") -> Make:
    """Builds a rank's engine."""

    def make() -> Engine:
        if layout.precision == "fp16":
            allow_fp16()
        return build_engine(layout.config(optimizer), layout.user_json())

    return make


def train(engine: Engine, first: int, stop: int, data_from: int | None = None) -> list[StepResult]:
    """Steps first to stop - 1, on the batches of the same numbers or of those from `data_from` on."""
    shift = 0 if data_from is None else data_from - first
    return [engine.train_step(step_of(engine, step + shift), step, RATE) for step in range(first, stop)]


def bad_step(engine: Engine, fault: str, number: int = BAD) -> StepResult:
    """A batch of its own, that must leave no trace: a spike (finite gradients), or what the last rank spoils."""
    batch = step_of(engine, 50)
    if fault == "spike":
        return engine.train_step(batch, number, RATE, lambda loss: SPIKE)
    losses = engine.passes.losses
    if engine.topology.rank == engine.topology.world_size - 1:
        engine.passes.losses = Spoiled(losses, fault)
    result = engine.train_step(batch, number, RATE)
    engine.passes.losses = losses
    return result


def with_and_without(rank: int, world_size: int, make: Make, faults: list[str]) -> dict[str, Any]:
    """A run that meets bad batches, each of another fault and before a good one, and one that skips their steps."""
    runs: list[list[Any]] = [[], []]
    refused = []
    for run, meets in zip(runs, (True, False), strict=True):
        engine = make()
        train(engine, 0, BAD)
        for number, fault in enumerate(faults):
            step = BAD + 2 * number
            if meets:
                before = held_by(engine)
                refused.append({"result": bad_step(engine, fault, step), "before": before, "after": held_by(engine)})
            run += train(engine, step + 1, step + 2)
        run.append(held_by(engine))
    return {"refused": refused, "with": runs[0], "without": runs[1]}


def check_refused(make: Make, world_size: int, faults: list[str], scales: bool = False) -> None:
    """`scales`: in fp16, an overflow is the loss scaler's affair, which counts it."""
    every_rank = run_ranks(with_and_without, world_size, make, faults, timeout_s=180)
    for ends in every_rank:
        for number, fault in enumerate(faults):
            found = ends["refused"][number]
            result = found["result"]
            assert result.anomaly == every_rank[0]["refused"][number]["result"].anomaly
            assert result.skipped
            assert math.isfinite(result.grad_norm) == (fault == "spike")
            if scales and fault != "spike":
                assert result.anomaly is None
                for state in (found["before"], found["after"], ends["with"][-1], ends["without"][-1]):
                    state["scalars"] = {"optimizer_updates": state["scalars"]["optimizer_updates"]}
            else:
                assert result.anomaly.kind == ("spike" if fault == "spike" else "non_finite")
                if fault != "spike":
                    what = "loss" if fault == "nan_logits" else "gradient norm"
                    assert f"the {what} of step {BAD + 2 * number + 1} is" in result.anomaly.why
            assert_same(found["after"], found["before"])
        assert ends["with"][:-1] == ends["without"][:-1]
        assert_same(ends["with"][-1], ends["without"][-1])


FAULTS = ["nan_logits", "infinite_gradient", "spike"]


@pytest.mark.parametrize("layout", some(LAYOUTS), ids=str)
def test_what_is_refused_leaves_no_trace(layout: Layout) -> None:
    """A spike that is skipped, and what is not finite."""
    scales = layout.precision == "fp16"
    for faults in [[fault] for fault in FAULTS] if scales else [FAULTS]:
        check_refused(maker(layout), layout.world_size, faults, scales)


def overflow_and_spike(rank: int, world_size: int, layout: Layout) -> dict[str, Any]:
    """A batch that is refused for its loss and whose gradients overflow as well."""
    engine = maker(layout)()
    train(engine, 0, BAD)
    before = engine.scalars()
    engine.passes.losses = Spoiled(engine.passes.losses, "infinite_gradient")
    result = engine.train_step(step_of(engine, 50), BAD, RATE, lambda loss: SPIKE)
    return {"before": before, "after": engine.scalars(), "result": result}


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_the_loss_scaler_hears_of_its_own_overflow_alone(stage: int) -> None:
    for found in run_ranks(overflow_and_spike, 2, Layout(2, stage, "fp16"), timeout_s=120):
        assert found["result"].anomaly == SPIKE
        assert found["after"]["cur_hysteresis"] == found["before"]["cur_hysteresis"] - 1
        assert found["after"]["optimizer_updates"] == found["before"]["optimizer_updates"] == BAD


def go_back(rank: int, world_size: int, make: Make, run_dir: Path) -> list[tuple[Any, Any]]:
    """What a running process finds after going back, and what a new one: at a checkpoint, then at the beginning."""
    live = make()
    config = live.config
    train(live, 0, BAD)
    save_at(live, config, run_dir, TrainState(step=BAD))
    train(live, BAD, BAD + 2)
    bad_step(live, "spike")
    resume_newest(live, config, run_dir)
    new = make()
    resume_newest(new, config, run_dir)
    pairs: list[tuple[Any, Any]] = [(held_by(live), held_by(new))]
    pairs.append((train(live, BAD, BAD + 2, data_from=20), train(new, BAD, BAD + 2, data_from=20)))
    pairs.append((held_by(live), held_by(new)))
    live.forget_updates()
    run_builder.initialize_weights(live)
    new = make()
    pairs.append((live.scalars(), new.scalars()))
    pairs.append((train(live, 0, 2, data_from=30), train(new, 0, 2, data_from=30)))
    pairs.append((held_by(live), held_by(new)))
    return pairs


@pytest.mark.parametrize("layout", some([Layout(2, 2), Layout(2, 3), Layout(2, 1, pipeline=2)]), ids=str)
def test_a_live_run_goes_back_as_a_new_process_does(tmp_path: Path, layout: Layout) -> None:
    check_going_back(maker(layout), layout.world_size, tmp_path)


def check_going_back(make: Make, world_size: int, run_dir: Path) -> None:
    for pairs in run_ranks(go_back, world_size, make, run_dir, timeout_s=240):
        for found, expected in pairs:
            if isinstance(found, dict) and "weights" in found:
                assert_same(found, expected)
            else:
                assert found == expected
