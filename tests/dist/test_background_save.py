"""A checkpoint written while training goes on: the bytes of one that training waited for, whole or not there."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxlm_ds.checkpoint import rank_states
from ctxlm_ds.checkpoint.manager import CheckpointManager
from ctxlm_ds.checkpoint.manifest import verify
from ctxlm_ds.checkpoint.training import TrainingCheckpoints
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.recipe.schema import CheckpointConfig, RunConfig
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.loop.saves import PendingSave
from ctxlm_ds.training.loop.state import TrainState
from tests.dist.forks import RanksFailed, fork_ranks
from tests.dist.states import DATA, Layout, resume_newest, some_steps
from tests.dist.training import GLOBAL_BATCH, build_engine
from tests.real_disks import Disk, freezable_disk, memory_disk

pytestmark = pytest.mark.dist
WAIT_S = 60.0
TWO = Layout(2, 1)


def checkpoints_of(engine: Engine, config: RunConfig, run_dir: Path, **settings: Any) -> TrainingCheckpoints:
    config = config.model_copy(update={"checkpoint": CheckpointConfig(**settings)})
    (run_dir / "tokenizer").mkdir(parents=True, exist_ok=True)
    engine.topology.all_reduce_max([0.0])
    manager = CheckpointManager(run_dir, config.checkpoint, engine.topology)
    return TrainingCheckpoints(manager, engine, config, run_dir / "tokenizer", DATA)


def of_two_ranks(run_dir: Path) -> tuple[Engine, TrainingCheckpoints]:
    engine = build_engine(TWO.config(), TWO.user_json())
    return engine, checkpoints_of(engine, TWO.config(), run_dir)


def state_at(step: int) -> TrainState:
    return TrainState(step=step, rows_consumed=step * GLOBAL_BATCH, recent_losses=[1.0, 2.0])


def finish(pending: PendingSave | None) -> None:
    assert pending is not None
    while not pending.over:
        pending.advance()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.name != "lost+found")


# The same bytes

FEW = [
    TWO, Layout(2, 3, "bf16"),
    *(pytest.param(layout, marks=pytest.mark.soak) for layout in (
        Layout(1, 0), Layout(2, 0), Layout(2, 0, tensor=2), Layout(2, 1, "bf16"), Layout(2, 2, "fp16"),
        Layout(2, 2, offload=True), Layout(2, 3, offload=True), Layout(2, 1, pipeline=2),
        Layout(4, 1, "bf16", tensor=2, pipeline=2), Layout(4, 3, tensor=2, sequence_parallel=True),
    )),
]  # fmt: skip


def save_both_ways(rank: int, world_size: int, config: RunConfig, user_json: dict[str, Any], run_dir: Path) -> None:
    """Two saves that training waits for, and the same two beside training; the second from the kept memory."""
    engine = build_engine(config, user_json)
    waiting, beside = (checkpoints_of(engine, config, run_dir / kind) for kind in ("waiting", "beside"))
    switched_off = checkpoints_of(engine, config, run_dir / "off", overlap=False)
    step = 0
    for _ in range(2):
        some_steps(engine, step, step + 2)
        step += 2
        waiting.save(state_at(step))
        assert switched_off.begin(state_at(step)) is None
        state = state_at(step)
        pending = beside.begin(state)
        # What changes now must not get into the files.
        state.step, state.recent_losses[0] = 99, 99.0
        some_steps(engine, step, step + 1)
        finish(pending)
        step += 1
    some_steps(engine, step, step + 1)


@pytest.mark.parametrize("layout", FEW, ids=str)
def test_the_bytes_are_those_of_a_save_that_training_waits_for(tmp_path: Path, layout: Layout) -> None:
    check_both_ways(layout.world_size, layout.config(), layout.user_json(), tmp_path)


def check_both_ways(world_size: int, config: RunConfig, user_json: dict[str, Any], tmp_path: Path) -> None:
    """Checkpoints written beside training and those that training waited for are the same files."""
    fork_ranks(save_both_ways, world_size, config, user_json, tmp_path, timeout_s=180)
    for step in (2, 5):
        folders = [tmp_path / kind / "checkpoints" / f"step-{step:08d}" for kind in ("waiting", "beside")]
        expected, found = (contents(folder) for folder in folders)
        assert found.keys() == expected.keys() and len(found) >= 4 + world_size
        for name, data in expected.items():
            assert found[name] == data, name
        assert verify(folders[1]).step == step
    for kind in ("beside", "off"):
        assert names(tmp_path / kind) == ["latest", "step-00000002", "step-00000005"]


def save_without_memory(rank: int, world_size: int, run_dir: Path) -> tuple[list[bool], list[str]]:
    """Two saves where the last rank finds too little memory."""
    available = 1024 if rank == world_size - 1 else 10**14
    rank_states.virtual_memory = lambda: SimpleNamespace(available=available)  # type: ignore[assignment]
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ctxlm_ds").addHandler(handler)
    engine, checkpoints = of_two_ranks(run_dir)
    pending = []
    for step in (1, 2):
        some_steps(engine, step - 1, step)
        pending.append(checkpoints.begin(state_at(step)) is not None)
    return pending, records


def test_without_memory_for_copies_training_waits(tmp_path: Path) -> None:
    for pending, records in fork_ranks(save_without_memory, 2, tmp_path, timeout_s=120):
        assert pending == [False, False]
        assert len(records) == 1 and "no memory for copies" in records[0] and "0.0 GB available" in records[0]
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002"]
    assert verify(tmp_path / "checkpoints" / "step-00000002")


# A disk that hangs


def hang_in_the_next_copy(checkpoints: TrainingCheckpoints, rank: int, disk: Disk) -> None:
    copy = checkpoints._states.copy

    def copy_and_hang() -> Any:
        if rank == 0:
            disk.freeze()
        return copy()

    checkpoints._states.copy = copy_and_hang  # type: ignore[method-assign]


def train_beside_a_hanging_disk(rank: int, world_size: int, run_dir: Path, disk: Disk) -> dict[str, Any]:
    engine, checkpoints = of_two_ranks(run_dir)
    some_steps(engine, 0, 1)
    hang_in_the_next_copy(checkpoints, rank, disk)
    pending = checkpoints.begin(state_at(1))
    losses = some_steps(engine, 1, 4)
    assert pending is not None
    busy = engine.topology.all_reduce_max([float(pending.busy)])[0]
    before = names(run_dir)
    engine.topology.all_reduce_max([0.0])
    if rank == 0:
        disk.thaw()
    finish(pending)
    return {"losses": losses, "busy": busy, "before": before}


def resumed_losses(rank: int, world_size: int, run_dir: Path) -> list[float]:
    engine = build_engine(TWO.config(), TWO.user_json())
    state = resume_newest(engine, TWO.config(), run_dir)
    assert state == state_at(1)
    return some_steps(engine, state.step, 4)


def test_training_goes_on_while_the_disk_hangs(tmp_path: Path) -> None:
    """Steps are taken while nothing can be written; what is written then is of the moment before them."""
    with freezable_disk(tmp_path / "checkpoints", tmp_path / "image") as disk:
        results = fork_ranks(train_beside_a_hanging_disk, 2, tmp_path, disk, timeout_s=120)
        for result in results:
            assert result["busy"] == 1.0 and result["before"] == ["step-00000001.partial"]
        assert names(tmp_path) == ["latest", "step-00000001"]
        again = fork_ranks(resumed_losses, 2, tmp_path, timeout_s=120)
    assert again[0] == results[0]["losses"]


def die_beside_a_hanging_disk(rank: int, world_size: int, run_dir: Path, disk: Disk) -> None:
    engine, checkpoints = of_two_ranks(run_dir)
    some_steps(engine, 0, 1)
    checkpoints.save(state_at(1))
    hang_in_the_next_copy(checkpoints, rank, disk)
    some_steps(engine, 1, 2)
    checkpoints.begin(state_at(2))
    some_steps(engine, 2, 3)
    if rank == 0:
        pid = os.fork()
        if pid == 0:
            # A process in such a write dies once the disk answers.
            time.sleep(0.5)
            disk.thaw()
            os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_while_writing_beside_training(tmp_path: Path) -> None:
    with freezable_disk(tmp_path / "checkpoints", tmp_path / "image") as disk:
        with pytest.raises(RanksFailed, match="exit status -9"):
            fork_ranks(die_beside_a_hanging_disk, 2, tmp_path, disk, timeout_s=120)
        deadline_s = time.monotonic() + WAIT_S
        disk.thaw()
        while names(tmp_path) != ["latest", "step-00000001", "step-00000002.partial"]:
            assert time.monotonic() < deadline_s, names(tmp_path)
            time.sleep(0.1)
        again = fork_ranks(resumed_losses, 2, tmp_path, timeout_s=120)
    assert len(again[0]) == 3


# Disks that fail


def fail_beside_training(rank: int, world_size: int, run_dir: Path, disk: Disk, fault: str) -> dict[str, Any]:
    """A good save, one that fails in its thread, and a good one again."""
    engine, checkpoints = of_two_ranks(run_dir)
    topology = engine.topology
    states = checkpoints._states
    # So little is asked for beforehand that the want of room is met in writing.
    states.bytes_of_all_ranks = lambda: -16 * 2**20 + 1  # type: ignore[method-assign]
    copy = states.copy

    def spoil(act: bool) -> Any:
        topology.all_reduce_max([0.0])
        if rank == 0 and act:
            disk.fill() if fault == "full" else disk.remount("ro")
        topology.all_reduce_max([0.0])
        return copy()

    def step_and_save(step: int, act: bool = False) -> None:
        some_steps(engine, step - 1, step)
        states.copy = lambda: spoil(act)  # type: ignore[method-assign]
        finish(checkpoints.begin(state_at(step)))

    step_and_save(1)
    try:
        step_and_save(2, act=True)
        error = "none"
    except CheckpointError as raised:
        error = str(raised)
    topology.all_reduce_max([0.0])
    if rank == 0:
        disk.empty() if fault == "full" else disk.remount("rw")
    topology.all_reduce_max([0.0])
    step_and_save(3)
    return {"error": error, "good": checkpoints.last_good()}


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_failure_beside_training_leaves_nothing_half_written(tmp_path: Path, fault: str) -> None:
    with memory_disk(tmp_path / "checkpoints", "8m") as disk:
        results = fork_ranks(fail_beside_training, 2, tmp_path, disk, fault, timeout_s=120)
        expected = "No space left on device" if fault == "full" else "Read-only file system"
        for result in results:
            assert expected in result["error"] and "step 2 could not be written" in result["error"]
            assert result["error"] == results[0]["error"]
            assert result["good"].endswith("step-00000003")
        left = ["step-00000002.partial"] if fault == "read-only" else []
        assert names(tmp_path) == sorted(["latest", "step-00000001", *left, "step-00000003"])
        for step in (1, 3):
            assert verify(tmp_path / "checkpoints" / f"step-{step:08d}").step == step
        described = json.loads((tmp_path / "checkpoints" / "step-00000003" / "state.json").read_text())
        assert described["train_state"]["step"] == 3
