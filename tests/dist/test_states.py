"""Planned states against real engines: parameters, gradients, fp32 weights and moments of every rank, element by
element, under each ZeRO stage and with tensor and pipeline parallelism.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.apps.plan.plan import Planner
from ctxlm_ds.apps.plan.states import Partition
from ctxlm_ds.recipe.hardware import Cluster, find_gpu
from ctxlm_ds.recipe.schema import ParallelConfig, RunConfig, TrainingConfig
from tests.dist.forks import fork_ranks
from tests.dist.training import GLOBAL_BATCH, build_engine, step_of, tiny_config

Counts = dict[str, int]


def count(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(tensor.numel() for tensor in tensors if tensor is not None)


def gradient_elements(engine: Any) -> int:
    """Kept from one micro-batch to the next and for the update, wherever the wrapper in use keeps them."""
    zero, parameters = engine._zero, list(engine.module.parameters())
    if hasattr(zero, "fp32_groups_gradients_flat"):
        return count(zero.fp32_groups_gradients_flat)
    if hasattr(zero, "grad_partitions_flat_buffer"):
        return count([zero.grad_partitions_flat_buffer])
    if getattr(zero, "partition_gradients", False):
        return count(tensor for group in zero.averaged_gradients.values() for tensor in group)
    return count(parameter.grad for parameter in parameters)


def state_counts(engine: Any) -> Counts:
    zero, inner = engine._zero, engine._inner
    parameters = list(engine.module.parameters())
    flat = {
        "bf16_groups_flat": "fp32_groups_flat_partition",
        "fp16_partitioned_groups_flat": "fp32_partitioned_groups_flat",
        "bit16_groups_flat": "single_partition_of_fp32_groups",
    }
    weights, master = count(parameters), 0
    for low, high in flat.items():
        if hasattr(zero, low):
            weights, master = count(getattr(zero, low)), count(getattr(zero, high))
            break
    states = [engine.optimizer_state(owner) for owner in inner.state]
    moments = count(state.get(name) for state in states for name in ("exp_avg", "exp_avg_sq", "ema"))
    return {"parameters": weights, "master": master, "moments": moments}


def train_and_count(rank: int, world_size: int, config: RunConfig, user_json: dict[str, Any]) -> Counts:
    engine = build_engine(config, user_json, config.training.activation_checkpointing)
    most = [0]

    def counting(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            most[0] = max(most[0], gradient_elements(engine))
            return function(*args, **kwargs)

        return run

    # The moments at which gradients are complete: before another micro-batch, before ZeRO shares them, at the update.
    for owner, name in ((engine._deepspeed, "backward"), (engine._zero, "reduce_gradients"), (engine._zero, "step")):
        if hasattr(owner, name):
            setattr(owner, name, counting(getattr(owner, name)))
    engine.train_step(step_of(engine, 0), 0, 0.01)
    return {"gradients": most[0], **state_counts(engine)}


def planned(config: RunConfig, user_json: dict[str, Any], world_size: int) -> list[Counts]:
    parallel, stage = config.parallel, user_json["zero_optimization"]["stage"]
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    layout = Layout(
        world_size // (tensor * pipeline), tensor, pipeline, stage, config.training.micro_batch_size,
        sequence_parallel=parallel.sequence_parallel,
    )  # fmt: skip
    planner = Planner(config, Cluster(find_gpu("A100-80"), 1, world_size), {stage: user_json})
    stages = [
        Partition(config.training, config.optimizer, planner.zero[stage], layout.data).state_elements(cut.parameters)
        for cut in planner.stages(layout)
    ]
    names = ("parameters", "gradients", "master", "moments")
    per_stage = layout.tensor * layout.data
    return [{name: getattr(stages[rank // per_stage], name) for name in names} for rank in range(world_size)]


def check(config: RunConfig, user_json: dict[str, Any], world_size: int, timeout_s: float = 60) -> None:
    found = fork_ranks(train_and_count, world_size, config, user_json, timeout_s=timeout_s)
    assert found == planned(config, user_json, world_size)


def config_of(precision: str, accumulation: str = "fp32", ema: float | None = None, **parallel: Any) -> RunConfig:
    training = TrainingConfig(
        global_batch_size=GLOBAL_BATCH, micro_batch_size=4, precision=precision, grad_accum_dtype=accumulation, ema=ema
    )
    return tiny_config(training=training, parallel=ParallelConfig(**parallel))


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation"),
    [
        (0, "fp32", "fp32"),
        (1, "fp32", "fp32"),
        (1, "bf16", "fp32"),
        (1, "bf16", "bf16"),
        (2, "bf16", "fp32"),
        (3, "bf16", "fp32"),
    ],
)
def test_states_are_shared_as_planned(stage: int, precision: str, accumulation: str) -> None:
    """With a moving average of the weights, beside the moments."""
    check(config_of(precision, accumulation, ema=0.9), {"zero_optimization": {"stage": stage}}, 2)


STAGES = [(0, "fp32"), (1, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")]
EVERY_LAYOUT = [
    pytest.param(stage, precision, data, pipeline, tensor, False, 2, marks=pytest.mark.soak)
    for tensor, pipeline, data, (stage, precision) in itertools.product((1, 2), (1, 2), (1, 2, 4), STAGES)
    if (pipeline == 1 or stage < 2) and data * tensor * pipeline <= 8
]
"""A pipeline takes stages 0 and 1."""


@pytest.mark.parametrize(
    ("stage", "precision", "data", "pipeline", "tensor", "split_tokens", "micro_batch_size"),
    [(2, "bf16", 2, 1, 2, True, 4), (1, "bf16", 2, 2, 1, False, 4), *EVERY_LAYOUT],
)
def test_states_of_a_split_model(
    stage: int, precision: str, data: int, pipeline: int, tensor: int, split_tokens: bool, micro_batch_size: int
) -> None:
    parallel = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "sequence_parallel": split_tokens}
    config = config_of(precision, **parallel).with_values("training", micro_batch_size=micro_batch_size)
    check(config, {"zero_optimization": {"stage": stage}}, data * tensor * pipeline, timeout_s=180)
