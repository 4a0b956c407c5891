"""Rates by width: layouts train the same, and the optimizers that follow the width pass the coordinate check."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from ctxlm_ds.models.program import plain_program
from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.schema import RunConfig
from tests.dist.reference import Split
from tests.dist.runner import ranks_of_this_file, run_ranks  # noqa: F401
from tests.dist.training import global_blocks, tiny_config, train

pytestmark = pytest.mark.dist
STEPS = 3
SPLITS = [Split(2, 1), Split(2, 3), Split(2, 1, 2), Split(2, 2, 1, 1, False, 2), Split(2, 1, 1, 2)]


def config_of(width: int, base: int | None, **changes: Any) -> RunConfig:
    config = tiny_config("gpt2", **changes)
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": width // 8}
    return config.with_values("model", base_width=base, initializer_range=1 / math.sqrt(16), **shape)


def trained(config: RunConfig, split: Split, steps: int) -> dict[str, Any]:
    user = {"zero_optimization": {"stage": split.stage}}
    found: dict[str, Any] = run_ranks(train, split.world_size, config, user, steps, timeout_s=180)[0]
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    found = trained(config_of(32, 8), Split(1, 0), STEPS)
    assert found["losses"] != trained(config_of(32, None), Split(1, 0), STEPS)["losses"]
    return found


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_layout_trains_as_one_rank(alone: dict[str, Any], split: Split) -> None:
    found = trained(config_of(32, 8, parallel=split.parallel), split, STEPS)
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    for name, weight in alone["weights"].items():
        if not name.endswith("qkv.bias"):  # no score depends on the biases of keys
            torch.testing.assert_close(found["weights"][name], weight, rtol=2e-4, atol=2e-5, msg=name)


def change_of_logits(config: RunConfig) -> float:
    """Return the root mean square of what the logits have changed in some steps."""
    program, fields = plain_program(config.model, ("logits",)), global_blocks(0).fields
    module, logits = program.module(), []
    for steps in (0, STEPS):
        module.load_state_dict(trained(config, Split(1, 0), steps)["weights"])
        logits.append(module.run(fields)["logits"].detach())
    return float((logits[1] - logits[0]).pow(2).mean().sqrt())


@pytest.mark.parametrize(("name", "settings"), [
    ("adamw", {}), ("stable_adamw", {}), ("muon", {"matrix_scale": "original", "matrix_learning_rate": 0.02}),
])  # fmt: skip
def test_logits_change_as_much_at_every_width(name: str, settings: dict[str, Any]) -> None:
    optimizer = choices.OPTIMIZER.make(name=name, learning_rate=0.003, weight_decay=0.0, eps=1e-12, **settings)
    widths, exponents = (32, 64, 128), []
    for base in (32, None):
        changes = [change_of_logits(config_of(width, base, optimizer=optimizer)) for width in widths]
        exponents.append(np.polyfit(np.log(widths), np.log(changes), 1)[0])
    assert -0.4 < exponents[0] < 0.15 and exponents[1] > 0.3, exponents
