"""LAMB's trust ratios are those of whole parameters under every ZeRO stage: against a float64 reference."""

from __future__ import annotations

import pytest
import torch

import ctxlm_ds.parallel.megatron  # noqa: F401 (imported before the ranks are forked: it takes seconds)
from ctxlm_ds.recipe import choices
from ctxlm_ds.parallel.parameters import ParameterFacts
from tests.dist.reference import SPLIT, Split, Tensors, Update, assert_equals_alone, train_alone
from tests.dist.training import tiny_config

pytestmark = pytest.mark.dist
STEPS = 4
OPTIMIZER = choices.OPTIMIZER.make(name="lamb", learning_rate=0.02, weight_decay=0.1, eps=1e-6, gradient_clipping=0.0)


def you_2019(parameters: Tensors, facts: dict[str, ParameterFacts]) -> Update:
    """Algorithm 2, a parameter at a time."""
    first = {name: torch.zeros_like(p) for name, p in parameters.items()}
    second = {name: torch.zeros_like(p) for name, p in parameters.items()}
    beta1, beta2 = OPTIMIZER.betas

    def update(step: int, gradients: Tensors) -> None:
        for name, p in parameters.items():
            g = gradients[name]
            first[name] = beta1 * first[name] + (1 - beta1) * g
            second[name] = beta2 * second[name] + (1 - beta2) * g * g
            adapted = first[name] / (1 - beta1**step)
            adapted = adapted / ((second[name] / (1 - beta2**step)).sqrt() + OPTIMIZER.eps)
            if p.ndim > 1:
                adapted = adapted + OPTIMIZER.weight_decay * p
                adapted = adapted * (p.norm() / adapted.norm())
            p -= OPTIMIZER.learning_rate * adapted

    return update


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], Tensors]:
    return train_alone(tiny_config(optimizer=OPTIMIZER), STEPS, you_2019)


PLAIN = [Split(*case) for case in ((1, 0), (2, 0), (1, 1), (2, 1), (4, 1), (2, 2), (2, 3), (4, 3))]


@pytest.mark.parametrize("split", [*PLAIN, *SPLIT], ids=str)
def test_lamb_equals_the_float64_reference(reference: tuple[list[float], Tensors], split: Split) -> None:
    assert_equals_alone(reference, OPTIMIZER, split)


def test_a_shard_of_a_parameter_would_give_another_ratio(reference: tuple[list[float], Tensors]) -> None:
    """The comparison can fail: halves of the first matrix have ratios that differ by more than its tolerance."""
    weight = reference[1]["encoder.0.mlp.up.weight"]
    top, bottom = weight.chunk(2)
    assert abs(float(top.norm() / bottom.norm()) - 1) > 1e-3
