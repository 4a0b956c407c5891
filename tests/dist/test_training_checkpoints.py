"""A checkpoint gives back weights, moments and the losses that follow, under the layout that wrote it and any other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.training.hooks.status import environment
from tests.dist.runner import run_ranks
from tests.dist.states import SAVED_STEP, Layout, assert_states_equal, checkpoints_of, resume_under, save_under
from tests.dist.training import build_engine

pytestmark = pytest.mark.dist

SAME = [
    ("adamw", Layout(2, 0)), ("adamw", Layout(2, 1, "bf16")), ("adamw", Layout(2, 2)),
    ("adamw", Layout(4, 1, "bf16", tensor=2, pipeline=2)), ("adamw", Layout(2, 3, "bf16", offload=2)),
    ("lamb", Layout(2, 3)), ("lamb", Layout(2, 1, "bf16", offload=1)),
]  # fmt: skip
SOAK = [
    ("adamw", Layout(2, 3, "bf16")), ("adamw", Layout(2, 2, offload=True)), ("adamw", Layout(2, 1, pipeline=2)),
    ("adamw", Layout(2, 3, "bf16", offload=True)), ("adamw", Layout(4, 3, "bf16", tensor=2)),
    ("lamb", Layout(2, 1, "bf16")),
    ("lamb", Layout(2, 3, offload=2)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "layout"), [*SAME, *(pytest.param(*case, marks=pytest.mark.soak) for case in SOAK)], ids=str
)
def test_the_same_layout_goes_on_bitwise(tmp_path: Path, optimizer: str, layout: Layout) -> None:
    """Dropout is on: its masks come back without any generator's state."""
    saved = save_under(layout, tmp_path, optimizer)
    resumed = resume_under(layout, tmp_path, optimizer)
    assert_states_equal(saved, resumed)
    assert resumed["losses"] == saved["losses"]
    for name, weight in saved["last_weights"].items():
        assert torch.equal(resumed["last_weights"][name], weight), name


@pytest.fixture(scope="module", params=["adamw", pytest.param("lamb", marks=pytest.mark.soak)])
def optimizer(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def saved_run(optimizer: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two ranks, ZeRO 3: each parameter in two pieces."""
    run_dir = tmp_path_factory.mktemp(optimizer)
    return run_dir, save_under(Layout(2, 3), run_dir, optimizer)


OTHERS = [Layout(1, 0), Layout(4, 3), pytest.param(Layout(4, 1), marks=pytest.mark.soak), Layout(2, 2, offload=True)]


@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_another_layout_goes_on_alike(optimizer: str, saved_run: tuple[Path, dict[str, Any]], layout: Layout) -> None:
    run_dir, saved = saved_run
    resumed = resume_under(layout, run_dir, optimizer)
    assert_states_equal(saved, resumed)
    assert resumed["losses"] == pytest.approx(saved["losses"], rel=1e-5)


CONTEXT, ONE_RANK = Layout(2, 1, context=2), Layout(1, 0)
CONTEXT_PAIRS = [(CONTEXT, ONE_RANK), (ONE_RANK, Layout(2, 3, context=2))]
CONTEXT_SOAK = [
    (Layout(4, 3, tensor=2, context=2, sequence_parallel=True), Layout(2, 1)), (Layout(2, 0, context=2), CONTEXT),
    (Layout(4, 1, pipeline=2, context=2), Layout(4, 2, context=2)), (Layout(4, 1, context=4), Layout(2, 1, tensor=2)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "layout"),
    [*CONTEXT_PAIRS, *(pytest.param(*pair, marks=pytest.mark.soak) for pair in CONTEXT_SOAK)],
    ids=str,
)
def test_ranks_that_share_rows_go_on_alike(tmp_path: Path, before: Layout, layout: Layout) -> None:
    saved = save_under(replace(before, heads=4), tmp_path)
    resumed = resume_under(replace(layout, heads=4), tmp_path)
    assert_states_equal(saved, resumed)
    assert resumed["losses"] == pytest.approx(saved["losses"], rel=1e-5)


def differences_from_before_the_axis(rank: int, world_size: int, layout: Layout, run_dir: Path) -> list[str]:
    """What a resume would say of a checkpoint of this layout whose environment has no context_parallel_size."""
    engine, config = build_engine(layout.config(), layout.user_json()), layout.config()
    saved = environment(engine, config.training)
    del saved["context_parallel_size"]
    return checkpoints_of(engine, config, run_dir)._changed_environment(saved)


@pytest.mark.parametrize(("layout", "wanted"), [(ONE_RANK, []), (CONTEXT, ["context_parallel_size 1 -> 2"])], ids=str)
def test_checkpoints_from_before_the_axis_are_of_whole_rows(tmp_path: Path, layout: Layout, wanted: list[str]) -> None:
    found = run_ranks(differences_from_before_the_axis, layout.world_size, layout, tmp_path)
    assert found == [wanted] * layout.world_size


def test_bf16_reads_what_fp32_wrote_and_keeps_it_whole(optimizer: str, saved_run: tuple[Path, dict[str, Any]]) -> None:
    """The fp32 weights come back unrounded; only what the model computes with is bf16."""
    run_dir, saved = saved_run
    for layout in (Layout(2, 1, "bf16"), Layout(2, 3, "bf16")):
        resumed = resume_under(layout, run_dir, optimizer)
        assert_states_equal(saved, resumed)
        assert resumed["losses"] == pytest.approx(saved["losses"], rel=2e-2)


def test_fused_adam_counts_its_updates_under_stage_0(tmp_path: Path) -> None:
    """Of a group's tensors it counts for one alone."""
    layout = Layout(2, 0, kernel="deepspeed")
    saved = save_under(layout, tmp_path)
    resumed = resume_under(layout, tmp_path)
    assert_states_equal(saved, resumed)
    assert resumed["losses"] == pytest.approx(saved["losses"], rel=1e-5)


def test_the_folder_holds_what_a_reader_needs(saved_run: tuple[Path, dict[str, Any]]) -> None:
    run_dir, saved = saved_run
    folder = run_dir / "checkpoints" / f"step-{SAVED_STEP:08d}"
    reader = CheckpointReader(folder)
    for name, weight in saved["weights"].items():
        assert torch.equal(reader.read_full(name), weight)
    environment = json.loads((folder / "state.json").read_text())["environment"]
    assert (environment["world_size"], environment["zero_stage"]) == (2, 3)


def resume_scaler(rank: int, world_size: int, layout: Layout) -> float:
    """The loss scale of an engine that is given an fp16 run's scaler."""
    engine = build_engine(layout.config(), layout.user_json())
    engine.restore_scalars({"optimizer_updates": 3, "cur_scale": 4096.0, "cur_iter": 9, "last_overflow_iter": 2})
    return float(engine._deepspeed.optimizer.loss_scale)


def test_a_loss_scale_stays_out_of_other_precisions() -> None:
    for layout in (Layout(1, 2, "bf16"), Layout(1, 3)):
        assert run_ranks(resume_scaler, 1, layout, timeout_s=60) == [1.0]
