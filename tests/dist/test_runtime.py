"""Process groups wait for a slow rank as long as the watchdog lets them, unless a person set a timeout."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ctxlm_ds.training.engine.runtime import leave_waiting_to_watchdog
from tests.dist.forks import fork_ranks


def reduce_late(rank: int, world_size: int) -> str:
    """Rank 1 comes later than the group's own timeout allows."""
    group = dist.new_group(range(world_size), timeout=timedelta(seconds=1))
    other = dist.new_group([rank for rank in range(world_size) if rank != 1], timeout=timedelta(seconds=1))
    leave_waiting_to_watchdog()
    if rank == 1:
        time.sleep(2.5)
    total = torch.ones(1)
    try:
        dist.all_reduce(total, group=group)
    except RuntimeError as error:
        return str(error)
    if rank != 1:
        dist.all_reduce(total, group=other)
    return f"{total.item():g}"


def test_a_late_rank_is_waited_for() -> None:
    assert fork_ranks(reduce_late, 3) == ["6", "3", "6"]


def with_timeout(rank: int, world_size: int) -> str:
    os.environ["DEEPSPEED_TIMEOUT"] = "1"
    return reduce_late(rank, world_size)


def test_a_timeout_from_the_environment_stays() -> None:
    assert "Timed out waiting 1000ms" in fork_ranks(with_timeout, 2)[0]
