"""The choice of tokens from logits: draws by key and place."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.training.engine.choice import TokenChoice


def test_draws_depend_on_key_and_place_and_follow_the_temperature() -> None:
    choice = TokenChoice("logits", 0.5, ParallelContext())
    count = 4000
    logits = torch.tensor([0.0, 1.0, float("-inf")]).expand(count, 1, 3)
    choice.places, choice.keys = [0] * count, list(range(count))
    choice({"logits": logits}, {}, torch.ones(1))
    first = choice.chosen
    assert sum(first) / count == pytest.approx(torch.sigmoid(torch.tensor(2.0)).item(), abs=0.02)
    choice({"logits": logits}, {}, torch.ones(1))
    assert choice.chosen == first
    choice.keys = [key + count for key in choice.keys]
    choice({"logits": logits}, {}, torch.ones(1))
    assert choice.chosen != first
