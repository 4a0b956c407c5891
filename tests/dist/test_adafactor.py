"""Adafactor's factors, bounds and rates are those of complete matrices in every layout: against a float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ctxlm_ds.parallel.megatron  # noqa: F401 (imported before the ranks are forked: it takes seconds)
from ctxlm_ds.recipe import choices
from ctxlm_ds.parallel.parameters import ParameterFacts
from ctxlm_ds.recipe.schema import ParallelConfig
from ctxlm_ds.training.optimizers import adafactor
from tests.dist.reference import Tensors, Update, train_alone
from tests.dist.runner import run_ranks
from tests.dist.training import tiny_config, train

pytestmark = pytest.mark.dist
STEPS, RATE, LEAST = 4, 0.02, 8
OPTIMIZER = choices.OPTIMIZER.make(name="adafactor", learning_rate=RATE, weight_decay=0.1, gradient_clipping=0.0)


@pytest.fixture(autouse=True)
def small_matrices_are_factored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adafactor, "LEAST_SIZE_TO_FACTOR", LEAST)


def make_update(parameters: Tensors, facts: dict[str, ParameterFacts]) -> Update:
    """mesh_tensorflow's AdafactorOptimizer, a matrix at a time."""
    second = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def update(step: int, gradients: Tensors) -> None:
        decay = 1.0 - step**-0.8
        for name, parameter in parameters.items():
            split, decays = facts[name].split, facts[name].decays
            blocks = split.blocks if split is not None and split.blocks else (parameter.shape[0],)
            parts = zip(parameter.split(blocks), gradients[name].split(blocks), second[name].split(blocks), strict=True)
            for p, g, v in parts:
                v.mul_(decay).add_((1 - decay) * (g * g + 1e-30))
                estimate = v
                if p.dim() == 2 and min(p.shape) >= LEAST:
                    estimate = v.mean(1)[:, None] * v.mean(0)[None, :] / v.mean()
                step_of = g * estimate.rsqrt()
                step_of = step_of / max(1.0, float(step_of.square().mean().sqrt()))
                rate = RATE * max(1e-3, float(p.square().mean().sqrt()))
                p.mul_(1 - rate * (OPTIMIZER.weight_decay if decays else 0.0)).sub_(rate * step_of)

    return update


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], Tensors]:
    losses, weights = train_alone(tiny_config(optimizer=OPTIMIZER), STEPS, make_update)
    return losses, weights


@pytest.mark.parametrize(
    ("world_size", "stage", "tensor", "pipeline"),
    [(1, 0, 1, 1), (2, 1, 1, 1), (2, 2, 1, 1), (2, 3, 1, 1), (2, 0, 2, 1), (4, 1, 2, 1), (2, 0, 1, 2), (8, 1, 2, 2)],
)
def test_adafactor_equals_the_float64_reference(
    reference: tuple[list[float], Tensors], world_size: int, stage: int, tensor: int, pipeline: int
) -> None:
    parallel = ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    config = tiny_config(optimizer=OPTIMIZER, parallel=parallel)
    user: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    losses, weights = reference
    for result in run_ranks(train, world_size, config, user, STEPS, timeout_s=180):
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        for name, weight in weights.items():
            got, wanted = (with_gradient(name, value) for value in (result["weights"][name].double(), weight))
            torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5, msg=name)


def with_gradient(name: str, value: torch.Tensor) -> torch.Tensor:
    """Leave out the biases of keys, which no score depends on: steps of their gradient would be those of rounding."""
    if not name.endswith("qkv.bias"):
        return value
    query, _, values = value.chunk(3)
    return torch.cat([query, values])
