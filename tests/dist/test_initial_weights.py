"""A second phase that keeps the first one's moments: any layout, against the first run itself with its count at 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.recipe.schema import RunConfig
from tests.dist.forks import RanksFailed
from tests.dist.runner import run_ranks
from tests.dist.states import SAVED, SAVED_STEP, STEPS, Layout, gather_moments, held_by, save_at, some_steps
from tests.dist.training import build_engine, gather_weights

pytestmark = pytest.mark.dist
FIRST = Layout(4, 1, tensor=2, pipeline=2, dropout=0.0)
SECOND = [
    Layout(1, 0, dropout=0.0), Layout(2, 3, dropout=0.0),
    Layout(4, 3, tensor=2, sequence_parallel=True, dropout=0.0),
]  # fmt: skip


def two_phases(rank: int, world_size: int, layout: Layout, config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Save, then go on in the same process as NVIDIA's script does: the moments stay, the count of updates is 0."""
    engine = build_engine(config, layout.user_json())
    some_steps(engine, 0, SAVED_STEP)
    save_at(engine, config, run_dir, SAVED)
    held = held_by(engine)
    for state in engine._inner.state.values():
        state["step"] = state["step"] * 0
    losses = some_steps(engine, SAVED_STEP, STEPS)
    return {**held, "losses": losses, "last_weights": gather_weights(engine)}


def second_phase(rank: int, world_size: int, layout: Layout, config: RunConfig) -> dict[str, Any]:
    engine = build_engine(config, layout.user_json())
    held = {"weights": gather_weights(engine), "scalars": engine.scalars()}
    held["moments"] = gather_moments(engine) if config.initialize_moments else {}
    losses = some_steps(engine, SAVED_STEP, STEPS)
    return {**held, "losses": losses, "last_weights": gather_weights(engine)}


@pytest.fixture(scope="module")
def first_phase(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    run_dir = tmp_path_factory.mktemp("phase1")
    config = FIRST.config(request.param)
    return request.param, run_dir, run_ranks(two_phases, FIRST.world_size, FIRST, config, run_dir, timeout_s=120)[0]


def start_second(layout: Layout, optimizer: str, run_dir: Path, keep: bool = True) -> dict[str, Any]:
    config = layout.config(optimizer).model_copy(update={"initialize_from": str(run_dir), "initialize_moments": keep})
    return run_ranks(second_phase, layout.world_size, layout, config, timeout_s=120)[0]


@pytest.mark.parametrize(
    ("first_phase", "layout"),
    [
        *(("lamb", layout) for layout in (FIRST, SECOND[0], SECOND[2])), ("adamw", SECOND[1]),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("lamb", SECOND[1]), ("adamw", FIRST))),
    ],
    indirect=["first_phase"], ids=str,
)  # fmt: skip
def test_the_moments_stay_and_the_count_begins_again(first_phase: Any, layout: Layout) -> None:
    optimizer, run_dir, first = first_phase
    second = start_second(layout, optimizer, run_dir)
    assert second["scalars"]["optimizer_updates"] == 0
    for group in ("weights", "moments"):
        assert all(torch.equal(second[group][name], value) for name, value in first[group].items())
    if layout == FIRST:
        assert second["losses"] == first["losses"]
        assert all(torch.equal(second["last_weights"][name], value) for name, value in first["last_weights"].items())
    assert second["losses"] == pytest.approx(first["losses"], rel=1e-5)


@pytest.mark.parametrize("first_phase", ["lamb"], indirect=True)
def test_without_the_setting_the_moments_begin_at_0(first_phase: Any) -> None:
    """The comparison can fail: other moments are other steps."""
    optimizer, run_dir, first = first_phase
    restarted = start_second(SECOND[0], optimizer, run_dir, keep=False)
    assert restarted["losses"][0] == pytest.approx(first["losses"][0], rel=1e-5)
    assert abs(restarted["losses"][-1] / first["losses"][-1] - 1) > 1e-3


@pytest.mark.parametrize("first_phase", ["lamb"], indirect=True)
def test_another_optimizer_is_refused_on_every_rank(first_phase: Any) -> None:
    _, run_dir, _ = first_phase
    with pytest.raises(RanksFailed, match=r"optimizer\.name lamb, but the recipe has adamw") as failed:
        start_second(Layout(2, 1), "adamw", run_dir)
    assert CheckpointError.__name__ in str(failed.value)
