"""Training of the tiny BERT on one process in float64, without the engine and DeepSpeed, and runs compared with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import ModelBuild
from ctxlm_ds.models.program import build_program
from ctxlm_ds.parallel.parameters import collect_facts
from ctxlm_ds.recipe.schema import ParallelConfig, RunConfig
from ctxlm_ds.recipe.sections import OptimizerSection
from tests.dist.runner import run_ranks
from tests.dist.training import global_batch, tiny_config, train
from tests.published_optimizers import Facts, Tensors, Update

LABELS = {"predicted_logits": "masked_lm_labels", "sentence_logits": "next_sentence_labels"}


@dataclass(frozen=True)
class Split:
    """Ranks, ZeRO stage, tensor- and pipeline-parallel sizes, sequence parallelism, context-parallel size."""

    world_size: int
    stage: int
    tensor: int = 1
    pipeline: int = 1
    sequence_parallel: bool = False
    context: int = 1

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(
            tensor_parallel_size=self.tensor, pipeline_parallel_size=self.pipeline,
            sequence_parallel=self.sequence_parallel, context_parallel_size=self.context,
        )  # fmt: skip


def assert_equals_alone(
    alone: tuple[list[float], Tensors], optimizer: OptimizerSection, split: Split, zero: dict[str, Any] | None = None
) -> None:
    """Losses of all ranks, and weights after them, are those of one process, which took as many steps."""
    config = tiny_config(optimizer=optimizer, parallel=split.parallel)
    user = {"zero_optimization": {"stage": split.stage, **(zero or {})}}
    losses, weights = alone
    results = run_ranks(train, split.world_size, config, user, len(losses), timeout_s=180)
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
    for name, weight in weights.items():
        got, wanted = (with_gradient(name, value) for value in (results[0]["weights"][name].double(), weight))
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5, msg=name)


def with_gradient(name: str, value: torch.Tensor) -> torch.Tensor:
    """Leave out the biases of keys, which no score depends on: steps of their gradient would be those of rounding."""
    if not name.endswith("qkv.bias"):
        return value
    query, _, values = value.chunk(3)
    return torch.cat([query, values])


def train_alone(
    config: RunConfig, steps: int, make_update: Callable[[Tensors, Facts], Update]
) -> tuple[list[float], Tensors]:
    """Losses, and the weights after `steps` steps; `make_update` gets parameters and facts."""
    model = (
        build_program(config.model, ModelBuild(tuple(LABELS), KernelSet(dict(config.kernels), "cpu", torch.float32)))
        .module(config.training.seed)
        .double()
    )
    parameters = dict(model.named_parameters())
    update = make_update({name: p.detach() for name, p in parameters.items()}, collect_facts(model))
    losses = []
    for step in range(steps):
        batch = global_batch(step)
        loss = sum(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.fields[LABELS[name]].flatten(), ignore_index=IGNORE_LABEL
            )
            for name, logits in model.run(batch.fields).items()
        )
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        update(step + 1, dict(zip(parameters, gradients, strict=True)))
    return losses, {name: p.detach().clone() for name, p in parameters.items()}
