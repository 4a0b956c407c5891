"""Several ranks saving one checkpoint: one folder, one fate, whichever rank fails or dies."""

from __future__ import annotations

import logging
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import ctxlm_ds.checkpoint.manager as manager_module
from ctxlm_ds.checkpoint.chunk_index import ChunkWriter, WrittenFiles, merge_index
from ctxlm_ds.checkpoint.manager import CheckpointManager
from ctxlm_ds.checkpoint.manifest import read_manifest, verify
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.parallel.topology import Topology, build_topology
from ctxlm_ds.process.run_lock import RunLock
from ctxlm_ds.recipe.schema import CheckpointConfig
from tests.dist.forks import RanksFailed, fork_ranks
from tests.dist.test_topology import calls_of
from tests.savers import save_now

pytestmark = pytest.mark.dist
NUM_ELEMENTS = 1000
COLLECTIVES = ("all_gather_object", "gather_object", "broadcast_object", "all_reduce_sum", "all_reduce_max")


def _manager(run_dir: Path, topology: Topology) -> CheckpointManager:
    return CheckpointManager(run_dir, CheckpointConfig(keep_last=2), topology)


def _save(manager: CheckpointManager, topology: Topology, step: int, fail_on: int = -1, **options: Any) -> Path:
    """Each rank writes its shard of one parameter; `fail_on` finds its disk full half-way."""
    rank, world_size = topology.rank, topology.world_size

    def write(folder: Path) -> WrittenFiles:
        writer = ChunkWriter(folder, rank)
        start, end = NUM_ELEMENTS * rank // world_size, NUM_ELEMENTS * (rank + 1) // world_size
        values = torch.arange(start, end, dtype=torch.float32) + step
        writer.add("p", "weight", (NUM_ELEMENTS,), start, values)
        if rank == fail_on:
            raise OSError(28, "No space left on device", str(folder / "moments"))
        writer.add("p", "exp_avg", (NUM_ELEMENTS,), start, -values)
        return writer.write()

    def finish(folder: Path, pieces: list[dict]) -> None:
        assert topology.is_main
        merge_index(folder, pieces, {})

    return save_now(manager, step, write, finish, **options)


def _check(folder: Path, step: int) -> None:
    assert verify(folder).step == step
    reader = CheckpointReader(folder)
    assert torch.equal(reader.read("p"), torch.arange(NUM_ELEMENTS, dtype=torch.float32) + step)
    assert torch.equal(reader.read("p", "exp_avg"), -reader.read("p"))


def _names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def _save_steps(rank: int, world_size: int, run_dir: Path, steps: list[int]) -> list[str]:
    topology = build_topology()
    manager = _manager(run_dir, topology)
    found = [str(manager.find_resumable())]
    for step in steps:
        found += [str(_save(manager, topology, step)), str(manager.find_resumable())]
    return found


def _collectives_of_a_save(rank: int, world_size: int, run_dir: Path) -> list[str]:
    topology = build_topology(rank % 2, 2)
    calls = calls_of(topology, COLLECTIVES)
    manager = _manager(run_dir, topology)
    _save(manager, topology, 1)
    saved = list(calls)
    with pytest.raises(CheckpointError, match=r"needs 1000000000\.000 GB and .* GB are free "):
        _save(manager, topology, 2, needed_bytes=10**18)
    assert calls[len(saved) :] == ["broadcast_object"]
    return saved


def test_collectives_of_a_save(tmp_path: Path) -> None:
    expected = ["broadcast_object", "gather_object", "broadcast_object"]
    assert fork_ranks(_collectives_of_a_save, 4, tmp_path) == [expected] * 4


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_save_and_find_the_same(tmp_path: Path, world_size: int) -> None:
    results = fork_ranks(_save_steps, world_size, tmp_path, [3, 6, 9])
    folders = [str(tmp_path / "checkpoints" / f"step-{step:08d}") for step in (3, 3, 6, 6, 9, 9)]
    assert results == [["None", *folders]] * world_size
    assert _names(tmp_path) == ["latest", "step-00000006", "step-00000009"]
    for step in (6, 9):
        _check(tmp_path / "checkpoints" / f"step-{step:08d}", step)
    files = verify(tmp_path / "checkpoints" / "step-00000009").files
    assert [name for name in files if name.startswith("weights")] == [
        f"weights-{rank:05d}.safetensors" for rank in range(world_size)
    ]


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    for world_size, step in ((3, 1), (2, 2), (1, 3)):
        fork_ranks(_save_steps, world_size, tmp_path, [step])
        _check(tmp_path / "checkpoints" / f"step-{step:08d}", step)


def _one_fails(rank: int, world_size: int, run_dir: Path, fail_on: int) -> tuple[str, str]:
    topology = build_topology()
    manager = _manager(run_dir, topology)
    _save(manager, topology, 1)
    try:
        _save(manager, topology, 2, fail_on=fail_on)
    except CheckpointError as error:
        topology.all_reduce_max([0.0])
        after = str(_names(run_dir))
        topology.all_reduce_max([0.0])
        # The ranks are still in step with each other: the next save works.
        _save(manager, topology, 3)
        return str(error), after
    return "nothing was raised", ""


@pytest.mark.parametrize("fail_on", [0, 1, 2])
def test_a_full_disk_on_any_rank_fails_the_save_on_all(tmp_path: Path, fail_on: int) -> None:
    results = fork_ranks(_one_fails, 3, tmp_path, fail_on)
    messages = {message for message, _ in results}
    assert len(messages) == 1
    message = messages.pop()
    assert f"step 2 could not be written (rank {fail_on}): No space left on device" in message and "moments" in message
    assert [names for _, names in results] == [str(["latest", "step-00000001"])] * 3
    assert _names(tmp_path) == ["latest", "step-00000001", "step-00000003"]
    _check(tmp_path / "checkpoints" / "step-00000003", 3)


def _not_shared(rank: int, world_size: int, run_dir: Path) -> str:
    from ctxlm_ds.checkpoint import folders

    folders.WAIT_S = 0.3
    topology = build_topology()
    try:
        _save(_manager(run_dir / f"node-{rank}", topology), topology, 1)
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


def test_a_run_directory_on_node_local_disks_is_told_apart(tmp_path: Path) -> None:
    messages = fork_ranks(_not_shared, 2, tmp_path)
    assert messages[0] == messages[1]
    assert "(rank 1)" in messages[0] and "storage that all nodes share" in messages[0]


def _not_shared_at_the_start(rank: int, world_size: int, run_dir: Path) -> tuple[str, str]:
    from ctxlm_ds.checkpoint import folders

    folders.WAIT_S = 0.3
    topology = build_topology()
    told = []
    for kind in ("shared", f"node-{rank}"):
        (run_dir / kind).mkdir(exist_ok=True)
        lock = RunLock(run_dir / kind)
        topology.run_on_rank_0(lambda lock=lock: lock.acquire())
        try:
            CheckpointManager(run_dir / kind, CheckpointConfig(), topology, lock).check_shared()
            told.append("shared")
        except CheckpointError as error:
            told.append(str(error))
        topology.run_on_rank_0(lock.release)
    return told[0], told[1]


def test_node_local_run_directories_are_told_apart_at_the_start(tmp_path: Path) -> None:
    for shared, own in fork_ranks(_not_shared_at_the_start, 2, tmp_path):
        assert shared == "shared"
        assert "node-1/lock.json is rank 0's lock and is not visible" in own and "all nodes share" in own


def _hashed(rank: int, world_size: int, run_dir: Path) -> list[str]:
    read: list[str] = []
    find_changed = manager_module.find_changed

    def counted(folder: Path, manifest: Any, names: list[str]) -> list[str]:
        read.extend(names)
        return find_changed(folder, manifest, names)

    manager_module.find_changed = counted
    assert _manager(run_dir, build_topology()).find_resumable() is not None
    return read


def test_ranks_share_the_files_of_a_checkpoint_that_is_verified(tmp_path: Path) -> None:
    fork_ranks(_save_steps, 2, tmp_path, [1])
    shares = fork_ranks(_hashed, 3, tmp_path)
    assert sorted(name for share in shares for name in share) == sorted(
        read_manifest(tmp_path / "checkpoints" / "step-00000001").files
    )
    assert all(shares)


def _damaged_newest(rank: int, world_size: int, run_dir: Path) -> tuple[str, list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ctxlm_ds").addHandler(handler)
    found = _manager(run_dir, build_topology()).find_resumable()
    return str(found), [text for text in records if "damaged" in text]


def test_a_damaged_newest_is_named_once_and_all_ranks_fall_back(tmp_path: Path) -> None:
    fork_ranks(_save_steps, 2, tmp_path, [1, 2])
    path = tmp_path / "checkpoints" / "step-00000002" / "moments-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-7] ^= 0x10
    path.write_bytes(data)
    (found, warnings), (other, silent) = fork_ranks(_damaged_newest, 2, tmp_path)
    assert found == other == str(tmp_path / "checkpoints" / "step-00000001")
    assert len(warnings) == 1 and not silent
    assert "step-00000002" in warnings[0] and "moments-00001.safetensors: sha256" in warnings[0]


def _save_for_ever(rank: int, world_size: int, run_dir: Path, victim: int, delay_s: float) -> None:
    topology = build_topology()
    lock = RunLock(run_dir)
    topology.run_on_rank_0(lambda: lock.acquire(wait_s=30))
    manager = CheckpointManager(run_dir, CheckpointConfig(keep_last=2), topology, lock if rank == 0 else None)
    manager.clean_leftovers()
    newest = manager.find_resumable()
    step = int(newest.name[5:]) + 1 if newest else 1
    _save(manager, topology, step)  # however slow the machine is
    if rank == victim:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, delay_s)
    while True:
        step += 1
        _save(manager, topology, step)


def test_any_rank_killed_at_random_moments(tmp_path: Path) -> None:
    """The others fail instead of hanging, and only whole checkpoints remain; the next start goes on from the newest."""
    drawn = random.Random(3)
    newest = 0
    for attempt in range(8):
        with pytest.raises(RanksFailed, match=f"rank {attempt % 2}:\ndied without a word: exit status -9"):
            fork_ranks(_save_for_ever, 2, tmp_path, attempt % 2, drawn.uniform(0.05, 0.5), timeout_s=60)
        folders = sorted((tmp_path / "checkpoints").glob("step-????????"))
        for folder in folders:
            _check(folder, int(folder.name[5:]))
        steps = [int(folder.name[5:]) for folder in folders]
        assert max(steps, default=0) >= newest
        newest = max(steps, default=0)
    assert newest >= 8
