"""The word embedding of a pipeline's first and last stage stays one; states in CPU memory give the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ctxlm_ds.recipe.schema import ParallelConfig, RunConfig, TrainingConfig
from tests.dist.runner import run_ranks
from tests.dist.test_update import allow_fp16
from tests.dist.training import GLOBAL_BATCH, build_engine, step_of, tiny_config

pytestmark = pytest.mark.dist
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
STEPS = 3


def table_of_each_rank(rank: int, world_size: int, config: RunConfig, zero: dict[str, Any]) -> dict[str, Any]:
    """Losses, and this rank's fp32 pieces of the tied table by (tensor-parallel rank, place) after some steps."""
    allow_fp16()
    user: dict[str, Any] = {"zero_optimization": zero}
    if config.training.precision == "fp16":
        user["fp16"] = {"hysteresis": 1}
    engine = build_engine(config, user)
    results = [engine.train_step(step_of(engine, step), step, 0.01) for step in range(STEPS)]
    pieces = {
        (engine.topology.tensor_parallel_rank, fragment.start + index): value
        for fragment in engine.fragments()
        if fragment.name == "word_embeddings.weight"
        for index, value in enumerate(fragment.weight().tolist())
    }
    figures = {"losses": [result.loss for result in results], "norms": [result.grad_norm for result in results]}
    return {**figures, "stage": engine.topology.pipeline_parallel_rank, "pieces": pieces}


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """One rank, ZeRO 0, fp32."""
    training = TrainingConfig(global_batch_size=GLOBAL_BATCH, micro_batch_size=4, precision="fp32")
    return run_ranks(table_of_each_rank, 1, tiny_config(training=training), {"stage": 0}, timeout_s=60)[0]


@pytest.mark.parametrize(
    ("precision", "tensor", "data", "zero"),
    [
        ("fp32", 1, 1, {"stage": 0}), ("fp32", 2, 1, {"stage": 1}),
        pytest.param("fp32", 1, 2, {"stage": 1, **OFFLOAD}, marks=pytest.mark.soak),
        ("bf16", 1, 1, {"stage": 1}), ("bf16", 1, 2, {"stage": 1, **OFFLOAD}), ("fp16", 1, 1, {"stage": 1}),
    ],
)  # fmt: skip
def test_both_copies_stay_equal(
    reference: dict[str, Any], precision: str, tensor: int, data: int, zero: dict[str, Any]
) -> None:
    training = TrainingConfig(
        global_batch_size=GLOBAL_BATCH, micro_batch_size=4, precision=precision, initial_loss_scale_power=8
    )
    layout = ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=2)
    config = tiny_config(training=training, parallel=layout)
    results = run_ranks(table_of_each_rank, 2 * tensor * data, config, zero, timeout_s=120)
    copies: list[dict[Any, float]] = [{}, {}]
    for result in results:
        copies[result["stage"]].update(result["pieces"])
    assert len(copies[0]) == 61 * 16 and copies[0].keys() == copies[1].keys()
    assert copies[0] == copies[1]
    assert results[0]["losses"] == pytest.approx(reference["losses"], rel=1e-5 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 1, **OFFLOAD},
        pytest.param({"stage": 2, **OFFLOAD}, marks=pytest.mark.soak),
        pytest.param({"stage": 3, **OFFLOAD}, marks=pytest.mark.soak),
        {"stage": 3, "offload_param": {"device": "cpu"}},
        {"stage": 3, **OFFLOAD, "offload_param": {"device": "cpu"}},
    ],
)
def test_offloaded_adamw_gives_the_numbers_of_memory(reference: dict[str, Any], zero: dict[str, Any]) -> None:
    training = TrainingConfig(global_batch_size=GLOBAL_BATCH, micro_batch_size=4, precision="fp32")
    layout = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True)
    results = run_ranks(table_of_each_rank, 4, tiny_config(training=training, parallel=layout), zero, timeout_s=120)
    for result in results:
        for figure in ("losses", "norms"):
            assert result[figure] == pytest.approx(reference[figure], rel=1e-5)
    assert torch.tensor(reference["losses"]).isfinite().all()
