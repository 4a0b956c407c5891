"""Which ranks add up and exchange what they hold of parameters, with the collectives replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.engine.sharers import Sharers

CPU = torch.device("cpu")
TENSOR_GROUP, REPLICA_GROUP = "tensor", "replica"


def topology(tensor: int, data: int, **places: int) -> Topology:
    groups: dict[str, Any] = {"tensor_group": TENSOR_GROUP, "replica_group": REPLICA_GROUP}
    return Topology(tensor_parallel_size=tensor, data_parallel_size=data, **places, **groups)


@pytest.mark.parametrize(
    ("tensor", "data", "stage", "group"),
    [
        (1, 1, 0, None), (1, 4, 0, None), (1, 1, 3, None), (2, 1, 0, TENSOR_GROUP), (2, 4, 0, TENSOR_GROUP),
        (1, 4, 1, REPLICA_GROUP), (2, 2, 3, REPLICA_GROUP),
    ],
)  # fmt: skip
def test_ranks_that_hold_different_parts_add_up(
    tensor: int, data: int, stage: int, group: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def all_reduce(values: torch.Tensor, group: Any) -> None:
        seen.append(group)
        values.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    values = torch.ones(3)
    Sharers(topology(tensor, data), stage, CPU).add_up(values)
    assert seen == ([] if group is None else [group])
    assert values.tolist() == [1.0 if group is None else 2.0] * 3


def test_ranks_are_those_of_the_pipeline_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    found = topology(2, 3, rank=9, world_size=12, pipeline_parallel_rank=1, pipeline_parallel_size=2)
    monkeypatch.setattr(Topology, "all_gather_object", lambda self, value: [value + rank for rank in range(12)])
    sharers = Sharers(found, 1, CPU)
    assert (sharers.rank, sharers.size) == (3, 6)
    assert sharers.gather(100) == [106, 107, 108, 109, 110, 111]


def test_what_each_rank_sends_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_to_all_single(out: torch.Tensor, packed: torch.Tensor, lengths: Any, sizes: Any, group: Any) -> None:
        assert (packed.tolist(), list(sizes), group) == ([1.0, 1.0, 2.0], [2, 1], REPLICA_GROUP)
        out.copy_(torch.arange(out.numel()))

    monkeypatch.setattr(torch.distributed, "all_to_all_single", all_to_all_single)
    sharers = Sharers(topology(1, 2), 1, CPU)
    received = sharers.exchange(torch.tensor([1.0, 1.0, 2.0]), [2, 1], [0, 4])
    assert [part.tolist() for part in received] == [[], [0.0, 1.0, 2.0, 3.0]]
