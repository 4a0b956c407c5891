"""Adagrad beside TensorFlow's formula in float64 and torch's class, and the gradient of a loss times a factor."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from ctxlm_ds.parallel.parameters import ZEROS, ParameterFacts
from ctxlm_ds.training.optimizers.adagrad import Adagrad, AdagradSection
from ctxlm_ds.training.optimizers.steps import Stepper
from tests.published_optimizers import duchi_2011
from tests.unit.training.optimizers.stepping import take_published_steps, take_steps

STEPS, RATE, START = 6, 0.2, 0.0025


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 40).view(8, 5))


def gradient(step: int, factor: float = 1.0) -> torch.Tensor:
    """Rows without a gradient are those of words that were not compared."""
    value = factor * torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
    value[step % 8] = 0.0
    return value


def train(optimizer: torch.optim.Optimizer, weight: nn.Parameter, factor: float = 1.0) -> torch.Tensor:
    for step in range(STEPS):
        weight.grad = gradient(step, factor)
        optimizer.step()
    return weight.detach()


def section(start: float, weight_decay: float = 0.0) -> AdagradSection:
    return AdagradSection(learning_rate=RATE, eps=1e-10, weight_decay=weight_decay, initial_accumulator=start)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_updates_are_tensorflows(weight_decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """accumulator += g², weight -= rate · g / sqrt(accumulator); a tensor is updated in pieces."""
    monkeypatch.setattr("ctxlm_ds.training.optimizers.steps.CHUNK_ELEMENTS", 7)
    facts, config = {"w": ParameterFacts(ZEROS, decays=True)}, section(START, weight_decay)
    found, wanted = (
        take(config, {"w": parameter().detach()}, facts, lambda name, step: gradient(step), STEPS)["w"]
        for take in (take_steps, partial(take_published_steps, duchi_2011))
    )
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-7)


def test_a_factor_of_the_loss_is_one_of_the_accumulator() -> None:
    """bilm-tf multiplies the loss by its 20 steps and begins at 1."""
    weights = parameter(), parameter()
    theirs = train(Stepper([weights[0]], Adagrad(section(1.0))), weights[0], factor=20.0)
    ours = train(Stepper([weights[1]], Adagrad(section(START))), weights[1])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
