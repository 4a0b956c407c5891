"""Adagrad in every layout: against a float64 reference."""

from __future__ import annotations

import pytest
import torch

import ctxlm_ds.parallel.megatron  # noqa: F401 (imported before the ranks are forked: it takes seconds)
from ctxlm_ds.recipe import choices
from ctxlm_ds.parallel.parameters import ParameterFacts
from tests.dist.reference import Split, Tensors, Update, assert_equals_alone, train_alone
from tests.dist.training import tiny_config

pytestmark = pytest.mark.dist
STEPS, START = 3, 0.0025
OPTIMIZER = choices.OPTIMIZER.make(
    name="adagrad", learning_rate=0.05, eps=1e-10, weight_decay=0.1, initial_accumulator=START, gradient_clipping=0.0
)


def published(parameters: Tensors, facts: dict[str, ParameterFacts]) -> Update:
    """tf.train.AdagradOptimizer with decoupled decay."""
    totals = {name: torch.full_like(p, START) for name, p in parameters.items()}

    def update(step: int, gradients: Tensors) -> None:
        for name, p in parameters.items():
            totals[name] += gradients[name] ** 2
            p.mul_(1 - OPTIMIZER.learning_rate * (OPTIMIZER.weight_decay if facts[name].decays else 0.0))
            p.sub_(OPTIMIZER.learning_rate * gradients[name] / totals[name].sqrt())

    return update


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], Tensors]:
    return train_alone(tiny_config(optimizer=OPTIMIZER), STEPS, published)


@pytest.mark.parametrize("split", [Split(1, 0), Split(2, 1), Split(2, 2), Split(2, 3), Split(4, 1, 2, 2)], ids=str)
def test_adagrad_equals_the_float64_reference(reference: tuple[list[float], Tensors], split: Split) -> None:
    assert_equals_alone(reference, OPTIMIZER, split)
