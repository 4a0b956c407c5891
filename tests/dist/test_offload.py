"""Optimizer states and parameters in CPU memory under ZeRO: losses and checkpoints as without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.dist.runner import run_ranks
from tests.dist.states import SAVED_STEP, Layout, assert_states_equal, resume_under, save_under
from tests.dist.training import tiny_config, train

pytestmark = pytest.mark.dist
CPU = {"device": "cpu"}
STEPS = 4


def zero(stage: int, *sections: str) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **{name: CPU for name in sections}}}


@pytest.fixture(scope="module")
def in_memory() -> dict[str, Any]:
    return run_ranks(train, 2, tiny_config(), zero(3), STEPS, timeout_s=120)[0]


@pytest.mark.parametrize(
    "user",
    [
        zero(1, "offload_optimizer"),
        zero(2, "offload_optimizer"),
        zero(3, "offload_optimizer"),
        zero(3, "offload_param"),
        zero(3, "offload_optimizer", "offload_param"),
    ],
    ids=str,
)
def test_offloaded_adamw_gives_the_losses_of_memory(in_memory: dict[str, Any], user: dict[str, Any]) -> None:
    result = run_ranks(train, 2, tiny_config(), user, STEPS, timeout_s=120)[0]
    assert result["losses"] == pytest.approx(in_memory["losses"], rel=1e-6)
    assert result["norms"] == pytest.approx(in_memory["norms"], rel=1e-5)


@dataclass(frozen=True)
class Offloaded(Layout):
    """A layout whose JSON offloads the sections named."""

    sections: tuple[str, ...] = ()

    def user_json(self) -> dict[str, Any]:
        return zero(self.stage, *self.sections)


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        ("adamw", Offloaded(2, 3, "bf16", sections=("offload_optimizer", "offload_param"))),
        ("lamb", Offloaded(2, 3, sections=("offload_optimizer", "offload_param"))),
        ("lamb", Offloaded(2, 1, "bf16", sections=("offload_optimizer",))),
        pytest.param("adamw", Offloaded(2, 1, sections=("offload_optimizer",)), marks=pytest.mark.soak),
        pytest.param("lamb", Offloaded(2, 2, sections=("offload_optimizer",)), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_bitwise(tmp_path: Path, optimizer: str, layout: Offloaded) -> None:
    saved = save_under(layout, tmp_path, optimizer, SAVED_STEP + 2)
    resumed = resume_under(layout, tmp_path, optimizer, SAVED_STEP + 2)
    assert_states_equal(saved, resumed)
    assert resumed["losses"] == saved["losses"]
