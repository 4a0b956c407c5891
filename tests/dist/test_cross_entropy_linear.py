"""Losses inside decoders under tensor parallelism, pipelines and ZeRO-3: the numbers of one rank with all logits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ctxlm_ds.recipe.schema import KernelsConfig, RunConfig
from tests.dist.runner import run_ranks
from tests.dist.test_engine import Case
from tests.dist.training import GLOBAL_BATCH, build_engine, step_of, train

pytestmark = pytest.mark.dist
STEPS = 3


def chunked(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"kernels": KernelsConfig(cross_entropy="chunked")})


def with_z_loss(config: RunConfig) -> RunConfig:
    """A weight with which the term is about a tenth of the loss."""
    return config.model_copy(update={"objective": config.objective.model_copy(update={"z_loss": 0.02})})


CASES = [
    Case(1, 1, 1, 0), Case(1, 1, 2, 3, recompute=True), Case(1, 2, 1, 1, 2),
    Case(2, 1, 1, 1, sequence_parallel=True), Case(2, 1, 2, 3),
]  # fmt: skip
OF_PARTS = [pytest.param("gpt2", case, marks=pytest.mark.soak) for case in CASES[1:4:2]]
"""What the last case splits as well."""


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    """One rank that holds all logits."""
    whole = Case(1, 1, 1, 0, GLOBAL_BATCH)
    configs = {family: whole.config(family) for family in ("bert", "gpt2")}
    configs["gpt2 with z_loss"] = with_z_loss(configs["gpt2"])
    return {
        name: run_ranks(train, 1, config, whole.user_json, STEPS, timeout_s=120)[0] for name, config in configs.items()
    }


@pytest.mark.parametrize(
    ("family", "case"), [*(("gpt2", case) for case in CASES[::2]), *OF_PARTS, ("bert", CASES[-2])], ids=str
)
def test_training_is_that_with_all_logits(family: str, case: Case, references: dict[str, dict[str, Any]]) -> None:
    config = chunked(case.config(family, vocab_multiple=8))
    for result in run_ranks(train, case.world_size, config, case.user_json, STEPS, timeout_s=280):
        for figure in ("losses", "norms"):
            assert result[figure] == pytest.approx(references[family][figure], rel=1e-5)


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        (CASES[2], "full"), (CASES[3], "full"), (CASES[0], "chunked"), (CASES[-1], "chunked"),
        pytest.param(CASES[2], "chunked", marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_the_z_loss_does_not_depend_on_the_layout(
    case: Case, kernel: str, references: dict[str, dict[str, Any]]
) -> None:
    """Micro-batches, pipeline stages, a split vocabulary with padding, and chunks, against one rank with all logits."""
    config = with_z_loss(case.config("gpt2", vocab_multiple=8))
    config = chunked(config) if kernel == "chunked" else config
    for result in run_ranks(train, case.world_size, config, case.user_json, STEPS, timeout_s=280):
        for figure in ("losses", "norms"):
            assert result[figure] == pytest.approx(references["gpt2 with z_loss"][figure], rel=1e-5)
            assert result[figure] != pytest.approx(references["gpt2"][figure], rel=1e-2)


def evaluate(rank: int, world_size: int, config: RunConfig) -> dict[str, float]:
    """Held-out figures after a step."""
    engine = build_engine(config, {"zero_optimization": {"stage": 1}})
    engine.train_step(step_of(engine, 0), 0, 0.01)
    figures: dict[str, float] = engine.evaluate(step_of(engine, 1).micro_batches)
    return figures


@pytest.mark.parametrize("has_z_loss", [False, True])
def test_evaluation_is_that_with_all_logits(has_z_loss: bool) -> None:
    config = Case(1, 1, 1, 1).config("gpt2")
    config = with_z_loss(config) if has_z_loss else config
    expected, found = (run_ranks(evaluate, 1, c, timeout_s=120)[0] for c in (config, chunked(config)))
    assert found == pytest.approx(expected, rel=1e-5) and found["causal_lm_accuracy"] > 0
    assert found["perplexity"] == pytest.approx(math.exp(found["causal_lm_loss"]))
    squares = found.get("causal_lm_z_loss", 0.0)
    assert (squares > 1.0) == has_z_loss and "causal_lm_z_accuracy" not in found
    assert found["loss"] == pytest.approx(found["causal_lm_loss"] + 0.02 * squares)
