"""A run saved under one layout goes on under every other: states bit for bit, losses to 1e-5, one export for all."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import pytest

import ctxlm_ds.parallel.megatron  # noqa: F401 (imported before the ranks are forked: it takes seconds)
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.export.base import export_of
from ctxlm_ds.export.safetensors_files import write_model
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.loop.state import TrainState
from tests.checkpoints import outputs_of
from tests.dist.runner import run_ranks
from tests.dist.states import (
    SAVED_STEP,
    Layout,
    assert_states_equal,
    checkpoints_of,
    resume_newest,
    resume_under,
    save_under,
)
from tests.dist.training import GLOBAL_BATCH, build_engine

pytestmark = pytest.mark.dist
STEPS = SAVED_STEP + 10
PLAIN = [Layout(1, 0), Layout(2, 1), Layout(2, 2), Layout(2, 3)]
SPLIT = [
    Layout(2, 0, tensor=2), Layout(4, 3, tensor=2, sequence_parallel=True), Layout(4, 2, tensor=2),
    Layout(2, 1, pipeline=2), Layout(4, 0, pipeline=2), Layout(4, 1, tensor=2, pipeline=2),
    Layout(8, 1, tensor=2, pipeline=2, sequence_parallel=True),
]  # fmt: skip
WRITTEN = Layout(4, 1, tensor=2, pipeline=2)


def without_dropout(layout: Layout, **changes: Any) -> Layout:
    return Layout(**{**layout.__dict__, "dropout": 0.0, **changes})


@pytest.fixture(scope="module")
def saved_runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run directory and what followed, by layout; made when asked for."""
    runs: dict[Layout, tuple[Path, dict[str, Any]]] = {}

    def find(layout: Layout) -> tuple[Path, dict[str, Any]]:
        if layout not in runs:
            run_dir = tmp_path_factory.mktemp("run")
            runs[layout] = run_dir, save_under(layout, run_dir, steps=STEPS)
        return runs[layout]

    return find


@pytest.mark.parametrize(
    ("layout", "precision"),
    [(Layout(4, 1, tensor=2, pipeline=2), "bf16"), (Layout(4, 3, tensor=2), "bf16"), (Layout(2, 1, pipeline=2), "fp32")],
    ids=str,
)
def test_the_same_split_layout_goes_on_bitwise(tmp_path: Path, layout: Layout, precision: str) -> None:
    """Dropout is on: its masks come back without any generator's state."""
    layout = Layout(**{**layout.__dict__, "precision": precision})
    saved = save_under(layout, tmp_path)
    resumed = resume_under(layout, tmp_path)
    assert_states_equal(saved, resumed)
    assert resumed["losses"] == saved["losses"]


def resume_and_save(rank: int, world_size: int, layout: Layout, config: RunConfig, source: Path, target: Path) -> None:
    """What one layout reads, written again by it."""
    engine = build_engine(config, layout.user_json())
    assert resume_newest(engine, config, source) is not None
    if rank == 0:
        (target / "tokenizer").mkdir(parents=True)
    engine.topology.barrier()
    state = TrainState(step=SAVED_STEP, rows_consumed=SAVED_STEP * GLOBAL_BATCH, tokens=77)
    checkpoints_of(engine, config, target).save(state)


def exported_digest(run_dir: Path, config: RunConfig, folder: Path) -> str:
    """Checksum of the safetensors that the newest checkpoint becomes as a plain Hugging Face model."""
    reader = CheckpointReader(run_dir / "checkpoints" / f"step-{SAVED_STEP:08d}")
    key_map = export_of(config.model.family).key_map(config.model, outputs_of(config), pad_id=1)
    folder.mkdir()
    write_model(folder, key_map, reader)
    (file,) = folder.glob("*.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "family", ["bert", *(pytest.param(name, marks=pytest.mark.soak) for name in ("roberta", "gpt2", "gpt1"))]
)
def test_one_state_exports_to_the_same_bytes_from_every_layout(tmp_path: Path, saved_runs: Any, family: str) -> None:
    source, _ = saved_runs(without_dropout(WRITTEN, family=family))
    layouts = [PLAIN[3], SPLIT[1], SPLIT[-1]]
    first = without_dropout(PLAIN[0], family=family).config()
    digests = {"written": exported_digest(source, first, tmp_path / "first")}
    for layout in layouts:
        config = without_dropout(layout, family=family).config()
        run_dir = tmp_path / str(layout)
        run_ranks(resume_and_save, layout.world_size, layout, config, source, run_dir, timeout_s=120)
        digests[str(layout)] = exported_digest(run_dir, config, tmp_path / f"{layout}-hf")
    assert len(set(digests.values())) == 1, digests
