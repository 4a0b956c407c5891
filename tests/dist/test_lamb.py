"""LAMB's trust ratios are those of whole parameters under every ZeRO stage: against a float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ctxlm_ds.parallel.megatron  # noqa: F401 (imported before the ranks are forked: it takes seconds)
from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.build import ModelBuild, build_model
from ctxlm_ds.recipe.schema import OptimizerConfig, ParallelConfig, RunConfig
from tests.dist.runner import run_ranks
from tests.dist.training import global_batch, tiny_config, train

pytestmark = pytest.mark.dist
STEPS = 4
OPTIMIZER = OptimizerConfig(name="lamb", learning_rate=0.02, weight_decay=0.1, eps=1e-6, gradient_clipping=0.0)


def reference_losses_and_weights(config: RunConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """You 2019, algorithm 2, a parameter at a time in float64, on one process without DeepSpeed."""
    labels_of = {"predicted_logits": "masked_lm_labels", "sentence_logits": "next_sentence_labels"}
    build = ModelBuild(tuple(labels_of), KernelSet(config.kernels, "cpu", torch.float32))
    model = build_model(config.model, build, config.training.seed).double()
    parameters = dict(model.named_parameters())
    first = {name: torch.zeros_like(p) for name, p in parameters.items()}
    second = {name: torch.zeros_like(p) for name, p in parameters.items()}
    beta1, beta2 = OPTIMIZER.betas
    losses = []
    for step in range(1, STEPS + 1):
        batch = global_batch(step - 1)
        loss = sum(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.fields[labels_of[name]].flatten(), ignore_index=IGNORE_LABEL
            )
            for name, logits in model.run(batch.fields).items()
        )
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        with torch.no_grad():
            for (name, p), g in zip(parameters.items(), gradients, strict=True):
                first[name] = beta1 * first[name] + (1 - beta1) * g
                second[name] = beta2 * second[name] + (1 - beta2) * g * g
                adapted = first[name] / (1 - beta1**step)
                adapted = adapted / ((second[name] / (1 - beta2**step)).sqrt() + OPTIMIZER.eps)
                if p.ndim > 1:
                    adapted = adapted + OPTIMIZER.weight_decay * p
                    adapted = adapted * (p.norm() / adapted.norm())
                p -= OPTIMIZER.learning_rate * adapted
    return losses, {name: p.detach().clone() for name, p in parameters.items()}


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], dict[str, torch.Tensor]]:
    return reference_losses_and_weights(tiny_config(optimizer=OPTIMIZER))


PLAIN = [(1, 0), (2, 0), (1, 1), (2, 1), (4, 1), (2, 2), (2, 3), (4, 3)]
SPLIT = [
    (2, 0, 2, 1, False), (4, 1, 2, 1, True), (4, 2, 2, 1, False), (4, 3, 2, 1, True), (2, 0, 1, 2, False),
    (4, 1, 1, 2, False), (8, 1, 2, 2, True),
]  # fmt: skip
"""Ranks, ZeRO stage, tensor- and pipeline-parallel sizes, sequence parallelism."""


@pytest.mark.parametrize(
    ("world_size", "stage", "tensor", "pipeline", "sequence_parallel"), [(*case, 1, 1, False) for case in PLAIN] + SPLIT
)
def test_lamb_equals_the_float64_reference(
    reference: tuple[list[float], dict[str, torch.Tensor]],
    world_size: int,
    stage: int,
    tensor: int,
    pipeline: int,
    sequence_parallel: bool,
) -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, sequence_parallel=sequence_parallel
    )
    config = tiny_config(optimizer=OPTIMIZER, parallel=parallel)
    user: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    losses, weights = reference
    for result in run_ranks(train, world_size, config, user, STEPS, timeout_s=180):
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(result["weights"][name].double(), weight, rtol=2e-4, atol=2e-5, msg=name)


def test_a_shard_of_a_parameter_would_give_another_ratio(
    reference: tuple[list[float], dict[str, torch.Tensor]],
) -> None:
    """The comparison can fail: halves of the first matrix have ratios that differ by more than its tolerance."""
    weight = reference[1]["encoder.0.mlp.up.weight"]
    top, bottom = weight.chunk(2)
    assert abs(float(top.norm() / bottom.norm()) - 1) > 1e-3
