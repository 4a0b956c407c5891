"""The base of optimizers of complete parameters: which are stepped, and which range of a flat tensor is whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ctxlm_ds.parallel.parameters import ZEROS, ParameterFacts
from ctxlm_ds.parallel.placement import Shard
from ctxlm_ds.training.engine.fragments import Fragment, Holding
from ctxlm_ds.training.optimizers.adamw import AdamW, AdamWSection
from ctxlm_ds.training.optimizers.steps import MOMENTS, ParameterLayout, Stepper


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


def test_a_state_begins_at_zero_and_counts_steps() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = Stepper([parameter], Recording())
    for step in (1, 2):
        state = optimizer.next_state(parameter, MOMENTS)
        assert state["step"] == step and not state["exp_avg"].any() and state.keys() == {"step", *MOMENTS}


def test_matrices_are_those_that_are_declared() -> None:
    facts = {"w": ParameterFacts(ZEROS, decays=True, matrix=True), "table": ParameterFacts(ZEROS, decays=True)}
    layout = ParameterLayout((), {"table": (9, 2), "w": (3, 2)}, facts)
    assert list(layout.matrices()) == [("w", (3, 2))]
