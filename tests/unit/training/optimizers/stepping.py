"""Steps of an optimizer of the project on one rank that holds complete parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ctxlm_ds.parallel.parameters import ParameterFacts
from ctxlm_ds.parallel.placement import Shard
from ctxlm_ds.recipe.sections import OptimizerSection
from ctxlm_ds.training.engine.fragments import Holding, list_fragments
from ctxlm_ds.training.optimizers.base import optimizer_of
from ctxlm_ds.training.optimizers.build import parameter_groups
from ctxlm_ds.training.optimizers.steps import ParameterLayout, Stepper
from tests.published_optimizers import Update


def take_steps(
    config: OptimizerSection,
    start: dict[str, torch.Tensor],
    facts: dict[str, ParameterFacts],
    gradient: Callable[[str, int], torch.Tensor],
    steps: int,
) -> dict[str, torch.Tensor]:
    """Parameters after `steps` steps from `start` with the gradients of names and steps."""
    named = [(name, nn.Parameter(value)) for name, value in start.items()]
    shapes = {name: tuple(value.shape) for name, value in start.items()}
    optimizer = Stepper(parameter_groups(named, facts, config), optimizer_of(config))
    holdings = {name: Holding(Shard.whole(shape)) for name, shape in shapes.items()}
    optimizer.bind(ParameterLayout(list_fragments(optimizer, named, holdings), shapes, facts))
    for step in range(steps):
        for name, parameter in named:
            parameter.grad = gradient(name, step)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named}


def take_published_steps(
    make_update: Callable[..., Update],
    config: OptimizerSection,
    start: dict[str, torch.Tensor],
    facts: dict[str, ParameterFacts],
    gradient: Callable[[str, int], torch.Tensor],
    steps: int,
) -> dict[str, torch.Tensor]:
    """The same in float64 with an update of tests/published_optimizers.py."""
    values = {name: value.double() for name, value in start.items()}
    update = make_update(config, values, facts)
    for step in range(steps):
        update(step + 1, {name: gradient(name, step).double() for name in values})
    return values
