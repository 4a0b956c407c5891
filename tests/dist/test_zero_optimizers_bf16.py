"""Sums of bf16 gradients are those of fp32: many small ones beside a large one are neither lost nor rounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.schema import KernelsConfig, TrainingConfig
from ctxlm_ds.training.engine.engine import Engine
from tests.dist.runner import run_ranks
from tests.dist.training import build_engine, global_batch, slice_batch, tiny_config

pytestmark = pytest.mark.dist
MICRO_BATCHES, SMALL = 32, 2.0**-9
EXACT, ROUNDED = 1.0 + (MICRO_BATCHES - 1) * SMALL, 1.0625
"""1.060546875, and the nearest bf16."""
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def build(world_size: int, user_json: dict[str, Any]) -> Engine:
    return build_engine(
        tiny_config(
            training=TrainingConfig(global_batch_size=MICRO_BATCHES, micro_batch_size=1, precision="bf16"),
            optimizer=choices.OPTIMIZER.make(learning_rate=0.01, gradient_clipping=1.0),
            kernels=KernelsConfig(optimizer="reference"),
        ),
        user_json,
    )


def train_step(engine: Engine, weight: Callable[[int, str], float]) -> float:
    """Take a step in which every element of a parameter has the gradient weight(micro-batch, name); return the norm."""
    rank, world_size = engine.topology.data_parallel_rank, engine.topology.data_parallel_size
    own = range(rank, MICRO_BATCHES, world_size)
    numbers, true_loss = iter(own), type(engine.passes).loss

    def loss(*arguments: Any) -> Any:
        outputs, stats = true_loss(engine.passes, *arguments)
        number = next(numbers)
        weights = {name: weight(number, name) for name, _ in engine.named_parameters}
        used = [weights[name] * p.float().sum() for name, p in engine.named_parameters if weights[name]]
        # The step's loss is the mean over its micro-batches.
        return MICRO_BATCHES * sum(used, torch.zeros(())), stats

    engine.passes.loss = loss  # type: ignore[method-assign]
    batch = slice_batch(global_batch(0), 0, 1)
    counts = {
        name.removesuffix("_labels"): len(own) * int((tensor != IGNORE_LABEL).sum())
        for name, tensor in batch.fields.items()
        if name.endswith("_labels")
    }
    step = Step([batch] * len(own), counts, len(own) * batch.num_tokens, rows_consumed=MICRO_BATCHES, epoch=0)
    return engine.train_step(step, 0, 0.0).grad_norm


def mean_gradient(rank: int, world_size: int, user_json: dict[str, Any]) -> float:
    """Return what the norm says of gradients that are 1 in the first micro-batch and 2^-9 in all others."""
    engine = build(world_size, user_json)
    norm = train_step(engine, lambda number, name: 1.0 if number == 0 else SMALL)
    return norm / math.sqrt(sum(math.prod(shape) for shape in engine.program.trained_shapes.values()))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("zero", [{}, OFFLOAD], ids=["plain", "offload"])
def test_stage_1_adds_up_in_fp32(world_size: int, zero: dict[str, Any]) -> None:
    user_json = {"zero_optimization": {"stage": 1, **zero}}
    for found in run_ranks(mean_gradient, world_size, user_json, timeout_s=200):
        assert found == pytest.approx(EXACT, rel=1e-6)


def test_communication_data_type_rounds_the_sums_of_ranks() -> None:
    user_json = {"zero_optimization": {"stage": 1}, "communication_data_type": "bf16"}
    for found in run_ranks(mean_gradient, 2, user_json, timeout_s=200):
        assert found == pytest.approx(ROUNDED, rel=1e-6)


@pytest.mark.parametrize(
    "averaging",
    [{}, {"prescale_gradients": True}, {"gradient_predivide_factor": 4.0}],
    ids=lambda chosen: str([*chosen]),
)
def test_sums_of_parameters_without_a_gradient_are_0(averaging: dict[str, Any]) -> None:
    run_ranks(_check_absent_gradients, 2, {"zero_optimization": {"stage": 1}, **averaging}, timeout_s=200)


def _check_absent_gradients(rank: int, world_size: int, user_json: dict[str, Any]) -> None:
    """A parameter has its gradient of an earlier step in none of the later ones."""
    engine = build(world_size, user_json)
    first, *others = (name for name, _ in engine.named_parameters)
    elements = {name: math.prod(shape) for name, shape in engine.program.trained_shapes.items()}
    everything = train_step(engine, lambda number, name: SMALL)
    assert everything == pytest.approx(MICRO_BATCHES * SMALL * math.sqrt(sum(elements.values())), rel=1e-6)
    for used in (first, others[0]):
        norm = train_step(engine, lambda number, name, used=used: SMALL * (name == used))
        assert norm == pytest.approx(MICRO_BATCHES * SMALL * math.sqrt(elements[used]), rel=1e-6)
        assert all(parameter.grad is None for _, parameter in engine.named_parameters)
    # Each rank has one gradient of `first`, which no second one follows.
    norm = train_step(engine, lambda number, name: SMALL * (name == (first if number < world_size else others[0])))
    weights = {first: world_size * SMALL, others[0]: (MICRO_BATCHES - world_size) * SMALL}
    squares = sum(elements[name] * weight**2 for name, weight in weights.items())
    assert norm == pytest.approx(math.sqrt(squares), rel=1e-6)
