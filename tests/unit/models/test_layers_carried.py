"""Tensors that layers carry from step to step: those of the last step that was kept."""

from __future__ import annotations

import torch

from ctxlm_ds.models.layers import CarriedStates, run_layer
from ctxlm_ds.parallel.context import DropoutStreams
from tests.unit.models.test_layers import layer


def test_carried_tensors_are_those_of_the_last_kept_step() -> None:
    description = layer("0", "x state", "y state", carries=frozenset({"state"}))
    module, carried = description.build(), CarriedStates(["state"])

    def step(number: int, keep: bool = True) -> float:
        carried.begin(number)
        tensors = {"x": torch.ones(())}
        run_layer(description, module, tensors, 0, DropoutStreams(), carried)
        carried.end_step(keep)
        return tensors["y"].item()

    # y = x + state, state = y + 1
    assert [step(0), step(0), step(1), step(0, keep=False), step(0)] == [1, 3, 1, 5, 5]
    named = carried.named()
    assert {name: float(value) for name, value in named.items()} == {"state.0": 6, "state.1": 2}
    assert not any(value.requires_grad for value in named.values())
    module.eval()
    assert step(0) == 1
    assert carried.named().keys() == named.keys() and float(carried.named()["state.0"]) == 6
    module.train()
    carried.load({"state.3": torch.ones(())})
    assert [step(0), step(3)] == [1, 2]


def test_an_evaluation_carries_its_own_tensors() -> None:
    description = layer("0", "x state", "y state", carries=frozenset({"state"}))
    module, carried = description.build(), CarriedStates(["state"])

    def step() -> float:
        carried.begin(0)
        tensors = {"x": torch.ones(())}
        run_layer(description, module, tensors, 0, DropoutStreams(), carried)
        return tensors["y"].item()

    assert step() == 1
    carried.end_step(keep=True)
    for _ in range(2):
        carried.begin_evaluation()
        module.eval()
        assert [step(), step(), step()] == [1, 3, 5] and carried.is_evaluating
        carried.end_evaluation()
        module.train()
    assert float(carried.named()["state.0"]) == 2 and step() == 3
