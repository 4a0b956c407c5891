"""A group of ranks outlives its cases, and a case that fails, dies or hangs takes nothing else with it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from tests.dist.forks import RanksFailed
from tests.dist.runner import Groups

pytestmark = pytest.mark.dist


@pytest.fixture
def groups() -> Iterator[Groups]:
    found = Groups()
    yield found
    found.close()


def add(rank: int, world_size: int, number: int) -> tuple[int, float]:
    total = torch.tensor(float(number + rank))
    torch.distributed.all_reduce(total)
    return os.getpid(), total.item()


def misbehave(rank: int, world_size: int, how: str) -> None:
    if rank == 1 and how == "raises":
        raise ValueError("of this rank")
    if rank == 1 and how == "dies":
        os._exit(3)
    if rank == 1 and how == "hangs":
        time.sleep(60)
    torch.distributed.barrier()


@pytest.mark.parametrize(
    ("how", "said"),
    [("raises", "ValueError: of this rank"), ("dies", "exit status 3"), ("hangs", "still running after")],
)
def test_the_next_case_runs_in_ranks_that_are_whole(groups: Groups, how: str, said: str) -> None:
    first, again = groups.run(add, 2, 1), groups.run(add, 2, 2)
    assert [pid for pid, _ in first] == [pid for pid, _ in again]
    assert [total for _, total in again] == [5.0, 5.0]
    with pytest.raises(RanksFailed, match=said):
        groups.run(misbehave, 2, how, timeout_s=3 if how == "hangs" else 30)
    after = groups.run(add, 2, 3)
    assert [total for _, total in after] == [7.0, 7.0]
    assert not {pid for pid, _ in after} & {pid for pid, _ in first}
    for pid, _ in first:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
