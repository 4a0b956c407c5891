"""Nothing is applied where a loss or a gradient is not finite on any rank; every rank sees it, and none hangs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ctxlm_ds.recipe.schema import RunConfig, TrainingConfig
from ctxlm_ds.training.engine.losses import TermLosses
from tests.dist.runner import run_ranks
from tests.dist.training import GLOBAL_BATCH, build_engine, gather_weights, step_for_rank, tiny_config

pytestmark = pytest.mark.dist


def config_of(precision: str, **changes: Any) -> RunConfig:
    training = TrainingConfig(global_batch_size=GLOBAL_BATCH, micro_batch_size=4, precision=precision, **changes)
    return tiny_config(training=training)


class Spoiled:
    """Losses that go wrong in one way, in the second of a step's micro-batches."""

    def __init__(self, losses: TermLosses, fault: str) -> None:
        self.outputs, self.label_fields = losses.outputs, losses.label_fields
        self._losses = losses
        self._fault = fault
        self._calls = 0

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], labels: Mapping[str, torch.Tensor], factors: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self._calls += 1
        first = self.outputs[0]
        if self._calls == 2 and self._fault == "nan_logits":
            outputs = {**outputs, first: outputs[first] * float("nan")}
        if self._calls == 2 and self._fault == "infinite_gradient":
            outputs[first].register_hook(lambda gradient: gradient * float("inf"))
        loss, sums = self._losses(outputs, labels, factors)
        if self._calls == 2 and self._fault == "infinite_loss":
            # As fp16 gives it where a logit overflows: the loss is infinite, its gradients are not.
            loss = loss + torch.full_like(loss, float("inf"))
            sums = sums | {"masked_lm/loss_sum": sums["masked_lm/loss_sum"] + float("inf")}
        return loss, sums


def allow_fp16() -> None:
    """DeepSpeed refuses fp16 on CPUs, for speed; torch computes it, and the code is the same as on a GPU."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def skip_in_fp16(rank: int, world_size: int, config: RunConfig, stage: int, fault: str) -> dict[str, Any]:
    """A step that rank 1 spoils among good ones."""
    allow_fp16()
    engine = build_engine(config, {"zero_optimization": {"stage": stage}, "fp16": {"hysteresis": 1}})
    losses = engine.passes.losses
    weights, results = [gather_weights(engine)], []
    for step in range(3):
        engine.passes.losses = Spoiled(losses, fault) if step == 1 and rank == 1 else losses
        results.append(engine.train_step(step_for_rank(step, 4, rank, world_size), step, 0.01))
        weights.append(gather_weights(engine))
    return {"results": results, "weights": weights, "scalars": engine.scalars()}


@pytest.mark.parametrize(
    ("stage", "fault"),
    [(1, "nan_logits"), (1, "infinite_gradient"), (1, "infinite_loss"), (2, "infinite_loss"), (3, "infinite_loss"),
     (3, "infinite_gradient")],
)  # fmt: skip
def test_fp16_skips_the_step_on_every_rank_and_halves_the_scale(stage: int, fault: str) -> None:
    config = config_of("fp16", initial_loss_scale_power=8)
    results = run_ranks(skip_in_fp16, 2, config, stage, fault, timeout_s=60)
    for result in results:
        assert [step.skipped for step in result["results"]] == [False, True, False]
        assert not any(step.anomaly for step in result["results"])
        assert [step.loss_scale for step in result["results"]] == [256.0, 128.0, 128.0]
        assert result["scalars"]["optimizer_updates"] == 2
        assert result["scalars"]["cur_scale"] == 128.0
    start, first, skipped, last = (weights["encoder.0.mlp.up.weight"] for weights in results[0]["weights"])
    assert torch.equal(skipped, first)
    assert not torch.equal(first, start)
    assert not torch.equal(last, skipped)


def overflow_at_the_smallest_scale(rank: int, world_size: int, config: RunConfig, stage: int) -> dict[str, Any]:
    """Every step overflows from a scale of 1."""
    allow_fp16()
    engine = build_engine(config, {"zero_optimization": {"stage": stage}, "fp16": {"hysteresis": 1}})
    before = gather_weights(engine)
    engine.passes.losses = Spoiled(engine.passes.losses, "infinite_gradient")
    result = engine.train_step(step_for_rank(0, 4, rank, world_size), 0, 0.01)
    return {"before": before, "after": gather_weights(engine), "result": result}


@pytest.mark.parametrize("stage", [1, 3])
def test_fp16_tells_where_the_scale_can_fall_no_further(stage: int) -> None:
    config = config_of("fp16", initial_loss_scale_power=0)
    for result in run_ranks(overflow_at_the_smallest_scale, 2, config, stage, timeout_s=60):
        assert "overflowed at the smallest loss scale" in result["result"].anomaly.why
        assert result["result"].loss_scale == 1.0
        for name, weight in result["before"].items():
            assert torch.equal(result["after"][name], weight), name
