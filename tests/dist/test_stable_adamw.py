"""StableAdamW bounds the step of complete parameters in every layout: against a float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ctxlm_ds.parallel.megatron  # noqa: F401 (imported before the ranks are forked: it takes seconds)
from ctxlm_ds.recipe import choices
from ctxlm_ds.parallel.parameters import ParameterFacts
from tests.dist.reference import Split, Tensors, Update, assert_equals_alone, train_alone
from tests.dist.training import tiny_config

pytestmark = pytest.mark.dist
STEPS, RATE = 4, 0.02
OPTIMIZER = choices.OPTIMIZER.make(
    name="stable_adamw", learning_rate=RATE, betas=(0.9, 0.8), weight_decay=0.1, eps=1e-6, gradient_clipping=0.0
)
"""With a small second beta and gradients that change from step to step, the bound acts (`test_the_bound_acts`)."""


def published(rms_of: list[float]) -> Any:
    def make_update(parameters: Tensors, facts: dict[str, ParameterFacts]) -> Update:
        """Wortsman 2023, algorithm 2, a parameter at a time; the RMS of each is added to `rms_of`."""
        first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        second = {name: torch.zeros_like(p) for name, p in parameters.items()}
        beta1, beta2 = OPTIMIZER.betas

        def update(step: int, gradients: Tensors) -> None:
            for name, p in parameters.items():
                g = gradients[name]
                first[name] = beta1 * first[name] + (1 - beta1) * g
                second[name] = beta2 * second[name] + (1 - beta2) * g * g
                m, v = first[name] / (1 - beta1**step), second[name] / (1 - beta2**step)
                rms = float((g * g / v.clamp_min(OPTIMIZER.eps**2)).mean().sqrt())
                rate = RATE / max(1.0, rms)
                p.mul_(1 - rate * (OPTIMIZER.weight_decay if facts[name].decays else 0.0))
                p.sub_(rate * m / (v.sqrt() + OPTIMIZER.eps))
                rms_of.append(rms)

        return update

    return make_update


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], Tensors, list[float]]:
    rms_of: list[float] = []
    return *train_alone(tiny_config(optimizer=OPTIMIZER), STEPS, published(rms_of)), rms_of


def test_the_bound_acts(reference: tuple[list[float], Tensors, list[float]]) -> None:
    assert max(reference[2]) > 1.1


CASES = [
    Split(1, 0), Split(2, 1), Split(2, 2), Split(2, 3), Split(2, 0, 2), Split(4, 1, 2), Split(2, 0, 1, 2),
    Split(8, 1, 2, 2),
]  # fmt: skip


@pytest.mark.parametrize("split", CASES, ids=str)
def test_stable_adamw_equals_the_float64_reference(
    reference: tuple[list[float], Tensors, list[float]], split: Split
) -> None:
    assert_equals_alone(reference[:2], OPTIMIZER, split)
