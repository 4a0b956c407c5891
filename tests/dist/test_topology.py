"""Topology over several gloo ranks, and the runner that starts them."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ctxlm_ds.errors import ConfigError, RunLockedError
from ctxlm_ds.parallel.topology import Topology, build_topology
from tests.dist.forks import fork_ranks

pytestmark = pytest.mark.dist


def _collectives(rank: int, world_size: int) -> dict[str, object]:
    topology = build_topology(local_rank=rank, local_world_size=world_size)
    summed = topology.all_reduce_sum(torch.tensor([0.1, float(rank)], dtype=torch.float32))
    return {
        "place": (topology.rank, topology.world_size, topology.data_parallel_rank, topology.data_parallel_size),
        "gathered": topology.all_gather_object({"rank": rank, "text": "é" * (rank * 1000)}),
        "on_main": topology.gather_object(rank * 10),
        "from_zero": topology.broadcast_object(f"value of {rank}"),
        "sum": summed.tolist(),
        "main": topology.is_main,
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_collectives(world_size: int) -> None:
    results = fork_ranks(_collectives, world_size)
    for rank, result in enumerate(results):
        assert result["place"] == (rank, world_size, rank, world_size)
        assert result["main"] is (rank == 0)
        assert result["gathered"] == [{"rank": r, "text": "é" * (r * 1000)} for r in range(world_size)]
        assert result["on_main"] == ([r * 10 for r in range(world_size)] if rank == 0 else None)
        assert result["from_zero"] == "value of 0"
        tenth = float(torch.tensor(0.1, dtype=torch.float32))
        assert result["sum"] == pytest.approx([world_size * tenth, sum(range(world_size))], rel=1e-15)


def calls_of(topology: Topology, names: Iterable[str]) -> list[str]:
    """The names of methods of a topology that are called from here on."""
    calls: list[str] = []
    for name in names:
        method = getattr(topology, name)
        object.__setattr__(
            topology, name, lambda *value, name=name, method=method: (calls.append(name), method(*value))[1]
        )
    return calls


def _gather_some(rank: int, world_size: int) -> tuple[dict[int, str], dict[int, str], list[str]]:
    topology = build_topology()
    calls = calls_of(topology, ("all_gather_object", "all_reduce_max"))
    none = topology.gather_some(None)
    topology.run_together(lambda: None)
    topology.run_on_rank_0_first(lambda: None)
    sent = list(calls)
    return none, topology.gather_some(None if rank else "of rank 0"), sent


def test_values_are_gathered_only_if_a_rank_has_one() -> None:
    for none, some, sent in fork_ranks(_gather_some, 3):
        assert (none, some) == ({}, {0: "of rank 0"})
        assert sent == ["all_reduce_max"] * 5


def _tree(rank: int, world_size: int) -> tuple[list[int], int, bool]:
    """Ranks that this one hears from, bytes that it is sent, and whether rank 0 gets every value."""
    topology = build_topology()
    heard: list[int] = []
    num_bytes = 0
    receive = dist.recv_object_list

    def counted(received: list[object], from_rank: int, **where: object) -> None:
        nonlocal num_bytes
        heard.append(from_rank)
        receive(received, from_rank, **where)
        num_bytes += len(pickle.dumps(received))

    dist.recv_object_list = counted
    values = topology.gather_object(_record(rank))
    return heard, num_bytes, values == ([_record(r) for r in range(world_size)] if rank == 0 else None)


def _record(rank: int) -> dict[str, object]:
    """What a rank says of the files that it wrote; later ranks hold more."""
    chunks = [
        {"file": f"moments-{rank:05d}.safetensors", "key": f"layers.{n}.weight#exp_avg", "start": n, "length": 7}
        for n in range(4 * (1 + rank))
    ]
    return {"pieces": chunks}


@pytest.mark.parametrize("world_size", [1, 5, 8])
def test_gathered_objects_travel_in_a_tree(world_size: int) -> None:
    found = fork_ranks(_tree, world_size)
    assert all(is_right for _, _, is_right in found)
    assert sum(len(heard) for heard, _, _ in found) == world_size - 1
    assert found[0][0] == [rank for rank in (1, 2, 4) if rank < world_size]
    sizes = [len(pickle.dumps(_record(rank))) for rank in range(world_size)]
    # A gather of torch fills each object up to the largest.
    assert found[0][1] <= 0.3 * max(sizes) * (world_size - 1)


def _count_sockets(rank: int, world_size: int, store: str) -> int:
    """Sockets that the CPU group opens for sums and broadcasts."""
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    dist.barrier()
    before = _sockets()
    topology = build_topology()
    topology.all_reduce_max([0.0])
    topology.broadcast_object("x")
    return _sockets() - before


def _sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def test_the_cpu_group_connects_only_ranks_that_talk(tmp_path: Path) -> None:
    ranks = 12
    assert max(fork_ranks(_count_sockets, ranks, str(tmp_path / "store"))) < ranks - 2


def _ordered(rank: int, world_size: int, log: Path) -> tuple[int, float]:
    topology = build_topology(local_rank=rank % 2, local_world_size=2)

    def note() -> int:
        time.sleep(0.05)
        with open(log, "a") as handle:
            handle.write(f"{rank}\n")
        return rank * 10

    own = topology.run_on_rank_0_first(note)
    assert topology.compute_on_rank_0(lambda: f"only {rank}") == "only 0"
    return own, topology.all_reduce_max([float(rank), 5.0 - rank])[0]


def test_rank_0_first_then_one_a_node_then_the_rest(tmp_path: Path) -> None:
    results = fork_ranks(_ordered, 4, tmp_path / "log")
    assert results == [(rank * 10, 3.0) for rank in range(4)]
    order = [int(line) for line in (tmp_path / "log").read_text().split()]
    assert order[:2] == [0, 2] and sorted(order[2:]) == [1, 3]


def _shared_errors(rank: int, world_size: int, run_dir: Path) -> list[str]:
    topology = build_topology()

    class Unpicklable(Exception):
        pass

    def fail(error: Exception) -> None:
        raise error

    caught = []
    for attempt in (
        lambda: topology.run_on_rank_0(lambda: fail(RunLockedError("held by somebody"))),
        lambda: topology.run_on_rank_0(lambda: fail(Unpicklable("odd one"))),
        lambda: topology.run_on_rank_0_first(lambda: fail(ConfigError(f"wrong on {rank}")) if rank else None),
    ):
        try:
            attempt()
        except Exception as error:
            caught.append(f"{type(error).__name__}: {error}")
    return caught


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    first, second = fork_ranks(_shared_errors, 2, tmp_path)
    assert first == ["RunLockedError: held by somebody", "Unpicklable: odd one", "ConfigError: wrong on 1"]
    assert second == [
        "RunLockedError: held by somebody", "RuntimeError: Unpicklable: odd one", "ConfigError: wrong on 1",
    ]  # fmt: skip
