"""The base of optimizers of complete parameters: which are stepped, and which range of a flat tensor is whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ctxlm_ds.parallel.placement import Shard
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.engine.fragments import Fragment, Holding
from ctxlm_ds.training.optimizers.adamw import AdamW, AdamWSection
from ctxlm_ds.training.optimizers.steps import ParameterLayout, Sharers, Stepper


class Recording(AdamW):
    def __init__(self) -> None:
        super().__init__(AdamWSection())
        self.stepped: list[Sequence[torch.Tensor]] = []

    def step_group(self, states: Stepper, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        self.stepped.append(parameters)


def test_parameters_without_a_gradient_and_empty_groups_are_left_out() -> None:
    with_grad, without = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with_grad.grad = torch.ones(2)
    rule = Recording()
    optimizer = Stepper([{"params": [with_grad, without]}, {"params": [nn.Parameter(torch.ones(1))]}], rule)
    optimizer.param_groups[1]["params"] = []
    optimizer.step()
    assert len(rule.stepped) == 1 and rule.stepped[0][0] is with_grad and len(rule.stepped[0]) == 1


def test_parts_are_the_ranges_of_the_fragments() -> None:
    flat = nn.Parameter(torch.zeros(6))
    whole = Holding(Shard.whole((5,)))
    fragments = [Fragment("b", 0, 4, flat, 2, False, whole), Fragment("a", 3, 2, flat, 0, False, whole)]
    optimizer = Stepper([flat], Recording())
    optimizer.bind(ParameterLayout(fragments, {"a": (5,), "b": (5,)}, {}))
    values = torch.arange(6.0)
    parts = {number: part.tolist() for number, _, part in optimizer.parts([flat], [values])}
    assert parts == {0: [0.0, 1.0], 1: [2.0, 3.0, 4.0, 5.0]}


TENSOR_GROUP, REPLICA_GROUP = "tensor", "replica"


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
    values, groups = torch.ones(3), {"tensor_group": TENSOR_GROUP, "replica_group": REPLICA_GROUP}
    topology = Topology(tensor_parallel_size=tensor, data_parallel_size=data, **groups)  # type: ignore[arg-type]
    Sharers(topology, stage, torch.device("cpu")).add_up(values)
    assert seen == ([] if group is None else [group])
    assert values.tolist() == [1.0 if group is None else 2.0] * 3
