"""Losses, gradient norms and weights do not depend on ranks, ZeRO stage or micro-batches (fp32, relative 1e-5)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.schema import TrainingConfig
from tests.dist.runner import run_ranks
from tests.dist.training import GLOBAL_BATCH, global_batch, tiny_config, train

pytestmark = pytest.mark.dist
STEPS = 5


def training(micro_batch_size: int, **changes: Any) -> TrainingConfig:
    return TrainingConfig(
        global_batch_size=GLOBAL_BATCH, micro_batch_size=micro_batch_size, precision="fp32", **changes
    )


@pytest.fixture(scope="module", params=["bert", pytest.param("roberta", marks=pytest.mark.soak)])
def family(request: pytest.FixtureRequest) -> str:
    """Without a soak one: tests/families trains every family under every stage."""
    return request.param


@pytest.fixture(scope="module")
def reference(family: str) -> dict[str, Any]:
    """One rank, ZeRO 0, the whole batch at once."""
    config = tiny_config(family, training=training(GLOBAL_BATCH))
    return run_ranks(train, 1, config, {"zero_optimization": {"stage": 0}}, STEPS, timeout_s=120)[0]


LAYOUTS = [(1, 1, 4), (1, 3, 8), (2, 0, 4), (2, 2, 1), (4, 3, 2)]
"""(ranks, ZeRO stage, micro-batch): every stage, every number of ranks, every split of the 16 rows."""


EVERY_LAYOUT = [
    layout
    for layout in itertools.product((1, 2, 4), (0, 1, 2, 3), (1, 2, 4, 8))
    if layout[0] * layout[2] <= GLOBAL_BATCH
]


@pytest.mark.parametrize(
    ("world_size", "stage", "micro_batch_size"),
    [*LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.soak) for layout in EVERY_LAYOUT if layout not in LAYOUTS)],
)
def test_every_layout_gives_the_same_numbers(
    family: str, reference: dict[str, Any], world_size: int, stage: int, micro_batch_size: int
) -> None:
    config = tiny_config(family, training=training(micro_batch_size))
    results = run_ranks(train, world_size, config, {"zero_optimization": {"stage": stage}}, STEPS, timeout_s=180)
    for result in results:
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(reference["norms"], rel=1e-5)
        for name, weight in reference["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (2, 3)])
def test_bf16_follows_fp32(family: str, reference: dict[str, Any], world_size: int, stage: int) -> None:
    config = tiny_config(family, training=training(4).model_copy(update={"precision": "bf16"}))
    results = run_ranks(train, world_size, config, {"zero_optimization": {"stage": stage}}, STEPS, timeout_s=180)
    assert results[0]["losses"] == pytest.approx(reference["losses"], rel=2e-2)


def test_a_different_batch_gives_different_numbers(family: str, reference: dict[str, Any]) -> None:
    """The comparisons above can fail: steps differ from one another by far more than their tolerance."""
    losses = reference["losses"]
    assert max(abs(a - b) / a for a, b in itertools.pairwise(losses)) > 1e-3
    assert not torch.equal(global_batch(0).fields["input_ids"], global_batch(1).fields["input_ids"])


def test_clipping_bounds_the_update(family: str) -> None:
    """With a tiny bound the norm reported is that before clipping, equal over stages."""
    optimizer = choices.OPTIMIZER.make(learning_rate=0.01, gradient_clipping=0.05)
    config = tiny_config(family, training=training(4), optimizer=optimizer)
    plain = run_ranks(train, 1, config, {"zero_optimization": {"stage": 0}}, STEPS, timeout_s=120)[0]
    for stage in (1, 3):
        sharded = run_ranks(train, 2, config, {"zero_optimization": {"stage": stage}}, STEPS, timeout_s=180)[0]
        assert sharded["norms"] == pytest.approx(plain["norms"], rel=1e-5)
        assert sharded["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert min(plain["norms"]) > 0.05
