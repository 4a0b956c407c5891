"""Fragments of two ranks: every element of every parameter once, and what is written to them is what the model has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ctxlm_ds.parallel.parameters import initial_value
from ctxlm_ds.recipe.schema import RunConfig, TrainingConfig
from ctxlm_ds.training.engine.fragments import refresh_model_weights
from ctxlm_ds.training.engine.runtime import gathered
from tests.dist.runner import run_ranks
from tests.dist.training import GLOBAL_BATCH, build_engine, step_of, tiny_config

pytestmark = pytest.mark.dist
LAYOUTS = [("fp32", 0), ("bf16", 1), ("fp32", 2), ("fp32", 3)]


def count_and_rewrite(rank: int, world_size: int, config: RunConfig, stage: int) -> dict[str, Any]:
    engine = build_engine(config, {"zero_optimization": {"stage": stage}})
    fragments, facts = engine.fragments(), engine.program.facts
    for fragment in fragments:
        full = initial_value(fragment.name, fragment.shard.shape, facts[fragment.name].init, config.training.seed)
        expected = fragment.shard.extract(full)[fragment.start :][: fragment.length]
        assert torch.equal(fragment.weight(), expected), fragment.name
    engine.train_step(step_of(engine, 0), 0, 0.01)
    state = engine._inner.state
    for fragment in fragments:
        moment = fragment.moment(state[fragment.owner], "exp_avg_sq")
        assert moment.shape == fragment.weight().shape and (moment >= 0).all()
        with torch.no_grad():
            fragment.weight().copy_(fragment.start + torch.arange(float(fragment.length)))
    refresh_model_weights(engine._zero)
    for name, parameter in engine.named_parameters:
        with gathered(parameter):
            expected = torch.arange(float(parameter.numel())).to(parameter.dtype)
            assert torch.equal(parameter.detach().flatten(), expected), name
    shapes = {name: tuple(shape) for name, shape in engine.program.trained_shapes.items()}
    return {"shapes": shapes, "ranges": [(f.name, f.start, f.length, f.replicated) for f in fragments]}


@pytest.mark.parametrize(("precision", "stage"), LAYOUTS)
def test_every_element_is_in_one_fragment_and_writes_reach_the_model(precision: str, stage: int) -> None:
    training = TrainingConfig(global_batch_size=GLOBAL_BATCH, micro_batch_size=4, precision=precision)
    results = run_ranks(count_and_rewrite, 2, tiny_config(training=training), stage)
    held = {name: torch.zeros(shape).flatten() for name, shape in results[0]["shapes"].items()}
    for result in results:
        for name, start, length, replicated in result["ranges"]:
            assert replicated == (stage == 0)
            held[name][start : start + length] += 1
    assert all((count == (2 if stage == 0 else 1)).all() for count in held.values())
    if stage:
        assert all(len(result["ranges"]) < 2 * len(held) for result in results)
