"""The optimizer section of a DeepSpeed JSON that is handed over: kinds that cannot be exact are refused."""

from __future__ import annotations

from typing import Any

import torch

from ctxlm_ds.recipe import choices
from ctxlm_ds.training.optimizers.from_ds_config import ELEMENTWISE, REFUSED, FromDeepSpeedConfig
from tests.each import each


def refusals(kind: str) -> list[str]:
    settings: dict[str, Any] = {"optimizer": {"type": kind, "params": {}}}
    return [problem.line() for problem in choices.OPTIMIZER.make("from_ds_config").hand_over(settings)]


def test_weight_decay_is_that_of_the_json() -> None:
    """A value in a group would hide it; biases and LayerNorm have none all the same."""
    optimizer = FromDeepSpeedConfig(choices.OPTIMIZER.make("from_ds_config", weight_decay=0.01))
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], **optimizer.group_settings(kind)}
              for kind in ("matrices", "weights", "rest", "fixed")]  # fmt: skip
    built = torch.optim.SGD(groups, lr=0.1, weight_decay=0.3)
    assert [group["weight_decay"] for group in built.param_groups] == [0.3, 0.3, 0.0, 0.0]
    none = FromDeepSpeedConfig(choices.OPTIMIZER.make("from_ds_config", weight_decay=0.0))
    assert none.group_settings("weights") == {} and none.group_settings("rest") == {"weight_decay": 0.0}
    every = choices.OPTIMIZER.make("from_ds_config", weight_decay=0.01, decay_biases=True)
    assert FromDeepSpeedConfig(every).group_settings("rest") == {}


@each("kind", sorted(REFUSED))
def test_an_optimizer_that_cannot_be_exact_is_refused(kind: str) -> None:
    assert f"optimizer.type: {kind}: {REFUSED[kind]}" in refusals(kind)[0]


def test_optimizers_are_spelt_as_torch_spells_them() -> None:
    assert all(hasattr(torch.optim, kind) for kind in ELEMENTWISE if kind != "Lion")
    assert "did you mean SGD?" in refusals("sgd")[0]
    assert not any(refusals(kind) for kind in (*ELEMENTWISE, "adamw", "lion"))
