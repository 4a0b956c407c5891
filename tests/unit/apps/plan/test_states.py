"""The memory of updates: what the planner counts is what the optimizers hold, on tensors that have no values."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ctxlm_ds.apps.plan.states import Partition, StageParameters
from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.zero import ZeroSettings
from ctxlm_ds.training.optimizers.base import optimizer_of
from ctxlm_ds.training.optimizers.steps import ParameterLayout, Stepper

OPTIMIZERS = ("adagrad", "lamb", "stable_adamw")
MATRIX, VECTOR, MATRICES, VECTORS = 1000, 8, 3, 2


class Peak(TorchDispatchMode):
    """The most bytes of storages that live together, apart from those of some tensors."""

    def __init__(self, present: list[torch.Tensor]) -> None:
        super().__init__()
        self._present = {tensor.untyped_storage()._cdata for tensor in present}
        self._made: list[weakref.ref[torch.Tensor]] = []
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(tensor) for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        live = [tensor.untyped_storage() for made in self._made if (tensor := made()) is not None]
        sizes = {storage._cdata: storage.nbytes() for storage in live if storage._cdata not in self._present}
        self.num_bytes = max(self.num_bytes, sum(sizes.values()))
        return result


def held_by_an_update(name: str, groups: list[list[int]]) -> int:
    """Bytes that the second step of an optimizer holds at most, in addition to weights, gradients and moments."""
    tensors = [[torch.nn.Parameter(torch.empty(size, device="meta")) for size in sizes] for sizes in groups]
    optimizer = Stepper([{"params": group} for group in tensors], optimizer_of(choices.OPTIMIZER.make(name)))
    flat = [tensor for group in tensors for tensor in group]
    optimizer.bind(ParameterLayout((), {str(number): tensor.shape for number, tensor in enumerate(flat)}, {}))
    for tensor in flat:
        tensor.grad = torch.empty_like(tensor)
    optimizer.step()
    states = [value for tensor in flat for value in optimizer.state[tensor].values() if isinstance(value, torch.Tensor)]
    with Peak([*flat, *(tensor.grad for tensor in flat if tensor.grad is not None), *states]) as peak:
        optimizer.step()
    return peak.num_bytes


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_update_holds_what_is_counted(name: str, stage: int) -> None:
    """The squares of a few parameters' norms, in fp64, are not counted."""
    config = load_config("bert-base", [f"optimizer.name={name}"])
    parameters = StageParameters((Counter({MATRIX: MATRICES}), Counter({VECTOR: VECTORS})))
    ranks = 4 if stage else 1
    groups = [[MATRIX] * MATRICES, [VECTOR] * VECTORS]
    if stage:  # one partition of each group
        groups = [[sum(group) // ranks] for group in groups]
    settings = ZeroSettings.of_json({"zero_optimization": {"stage": stage}}, 8)
    counted = Partition(config.training, config.optimizer, settings, ranks).workspace_bytes(parameters)
    assert counted <= held_by_an_update(name, groups) <= counted + 500
