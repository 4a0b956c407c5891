"""ZeRO stages 0 to 2 with fewer operators have the losses, norms and weights of DeepSpeed's own, bit for bit."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ctxlm_ds.process.patches import replaced
from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.schema import ParallelConfig, RunConfig, TrainingConfig
from ctxlm_ds.training.engine import engine, zero_optimizers
from ctxlm_ds.training.engine.zero_optimizers import ZeroOptimizer
from tests.dist.runner import run_ranks
from tests.dist.training import GLOBAL_BATCH, build_engine, gather_weights, step_of, tiny_config

pytestmark = pytest.mark.dist
STEPS = 3
OVERLAPPED = {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
ROUNDED = {"communication_data_type": "bf16"}


def trained(
    rank: int, world_size: int, config: RunConfig, user_json: dict[str, Any], uses_all: bool, theirs: bool
) -> dict[str, Any]:
    """What some steps give; with `theirs` DeepSpeed's own code does everything."""
    with ExitStack() as stack:
        if theirs:
            stack.enter_context(replaced(zero_optimizers, "ZeroOptimizer", DeepSpeedZeroOptimizer))
            stack.enter_context(replaced(engine, "leave_gradients_in_place", lambda *_: None))
        built = build_engine(config, user_json)
        if not uses_all:
            leave_one_out(built)
        results = [built.train_step(step_of(built, step), step, 0.01) for step in range(STEPS)]
        is_own = isinstance(built._zero, ZeroOptimizer) or "_reduce_non_expert_gradients" in vars(built._deepspeed)
        figures = [(result.loss, result.grad_norm) for result in results]
        return {"is_own": is_own, "figures": figures, "weights": gather_weights(built)}


def leave_one_out(built: engine.Engine) -> None:
    """Give all parameters but the first a gradient that the data does not change."""
    true_loss = type(built.passes).loss

    def loss(*arguments: Any) -> Any:
        used = [parameter.float().square().sum() for _, parameter in built.named_parameters[1:]]
        return torch.stack(used).sum(), true_loss(built.passes, *arguments)[1]

    built.passes.loss = loss  # type: ignore[method-assign]


def config_of(precision: str, micro_batch_size: int, clipping: float, **layout: int) -> RunConfig:
    return tiny_config(
        dropout=0.1,
        optimizer=choices.OPTIMIZER.make(learning_rate=0.01, weight_decay=0.1, gradient_clipping=clipping),
        training=TrainingConfig(global_batch_size=GLOBAL_BATCH, micro_batch_size=micro_batch_size, precision=precision),
        parallel=ParallelConfig(**layout),
    )


@pytest.mark.parametrize("uses_all", [True, False], ids=["all", "one-unused"])
@pytest.mark.parametrize(
    ("world_size", "stage", "zero", "config"),
    [
        (1, 0, {}, config_of("fp32", 4, 1e-2)),
        (1, 1, OVERLAPPED, config_of("fp32", 4, 1e-2)),
        (1, 1, {"contiguous_gradients": False}, config_of("fp32", GLOBAL_BATCH, 0.0)),
        (1, 2, OVERLAPPED, config_of("fp32", 4, 1e-2)),
        (1, 2, OVERLAPPED, config_of("bf16", 4, 1e-2)),
        (2, 1, OVERLAPPED, config_of("fp32", 4, 1e-2)),
        (2, 2, OVERLAPPED, config_of("fp32", 4, 1e-2)),
        (2, 1, OVERLAPPED, config_of("fp32", 4, 1e-2, tensor_parallel_size=2)),
    ],
    ids=lambda value: "-" if isinstance(value, dict | RunConfig) else str(value),
)
def test_figures_and_weights_are_deepspeeds(
    world_size: int, stage: int, zero: dict[str, Any], config: RunConfig, uses_all: bool
) -> None:
    compare(world_size, config, {"zero_optimization": {"stage": stage, **zero}}, uses_all)


@pytest.mark.parametrize("stage", [0, 1])
def test_pipeline_of_two_stages(stage: int) -> None:
    config = config_of("fp32", 4, 1e-2, pipeline_parallel_size=2)
    compare(2, config, {"zero_optimization": {"stage": stage}}, uses_all=True)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("averaging", [ROUNDED, {"gradient_predivide_factor": 3.0}], ids=["rounded", "predivided"])
def test_gradients_that_averaging_changes_on_one_rank(stage: int, averaging: dict[str, Any]) -> None:
    user_json = {"zero_optimization": {"stage": stage, "reduce_scatter": averaging == ROUNDED}, **averaging}
    compare(1, config_of("fp32", 4, 1e-2), user_json, uses_all=True, is_own=stage > 0)


def compare(world_size: int, config: RunConfig, user_json: dict[str, Any], uses_all: bool, is_own: bool = True) -> None:
    ours, theirs = (
        run_ranks(trained, world_size, config, user_json, uses_all, theirs, timeout_s=200)[0]
        for theirs in (False, True)
    )
    assert (ours["is_own"], theirs["is_own"]) == (is_own, False)
    assert ours["figures"] == theirs["figures"]
    assert ours["weights"].keys() == theirs["weights"].keys()
    different = [name for name, weight in ours["weights"].items() if not torch.equal(weight, theirs["weights"][name])]
    assert not different
