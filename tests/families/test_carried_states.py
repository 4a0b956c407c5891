"""What layers carry from step to step is part of a checkpoint: any layout goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.recipe.schema import CheckpointConfig, RunConfig
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.loop.state import TrainState
from tests.dist.forks import RanksFailed
from tests.dist.runner import run_ranks
from tests.dist.states import Layout, checkpoints_of, resume_newest
from tests.dist.training import GLOBAL_BATCH
from tests.families import runs
from tests.families.toy_runs import OPTIMIZER, build_engine, config_of, step_of

pytestmark = pytest.mark.dist
SAVED, LAST = 2, 4


def some_steps(engine: Engine, start: int, stop: int) -> list[float]:
    return [engine.train_step(step_of(engine, step), step, OPTIMIZER.learning_rate).loss for step in range(start, stop)]


def save(rank: int, world_size: int, layout: Layout, overlap: bool, run_dir: Path) -> dict[str, Any]:
    """Train, evaluate, save and train on; the losses after the checkpoint."""
    config = config_of("lanes", layout, layout.pipeline > 1)
    config = config.model_copy(update={"checkpoint": CheckpointConfig(overlap=overlap)})
    engine = build_engine("lanes", config, layout)
    checkpoints = checkpoints_of(engine, config, run_dir)
    some_steps(engine, 0, SAVED)
    engine.evaluate(step_of(engine, 9).micro_batches)
    (run_dir / "tokenizer").mkdir(parents=True, exist_ok=True)
    engine.topology.all_reduce_max([0.0])
    pending = checkpoints.begin(TrainState(step=SAVED, rows_consumed=SAVED * GLOBAL_BATCH, tokens=1))
    losses = some_steps(engine, SAVED, LAST)
    while pending is not None and not pending.over:
        pending.advance()
    return {"losses": losses}


def resume(rank: int, world_size: int, layout: Layout, config: RunConfig, run_dir: Path) -> list[float]:
    engine = build_engine("lanes", config, layout)
    state = resume_newest(engine, config, run_dir)
    assert state is not None and state.step == SAVED
    return some_steps(engine, SAVED, LAST)


def resume_under(layout: Layout, run_dir: Path) -> list[float]:
    config = config_of("lanes", layout, layout.pipeline > 1)
    return run_ranks(resume, layout.world_size, layout, config, run_dir, timeout_s=120)[0]


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Saved by one rank."""
    run_dir = tmp_path_factory.mktemp("lanes")
    return run_dir, run_ranks(save, 1, Layout(1, 0), False, run_dir, timeout_s=120)[0]["losses"]


@pytest.mark.parametrize("layout", [Layout(1, 0), Layout(2, 3), Layout(4, 1, tensor=2, pipeline=2)], ids=str)
def test_every_layout_goes_on_with_the_state(saved_run: tuple[Path, list[float]], layout: Layout) -> None:
    run_dir, losses = saved_run
    assert resume_under(layout, run_dir) == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_pipeline_saves_one_rank_and_two_read(
    saved_run: tuple[Path, list[float]], tmp_path: Path, overlap: bool
) -> None:
    layout = Layout(4, 1, tensor=2, pipeline=2) if overlap else Layout(4, 1, pipeline=2)
    losses = run_ranks(save, 4, layout, overlap, tmp_path, timeout_s=120)[0]["losses"]
    assert losses == pytest.approx(saved_run[1], rel=1e-5)
    assert resume_under(Layout(1, 0), tmp_path) == pytest.approx(losses, rel=1e-5)
    ours, theirs = (CheckpointReader(next((run / "checkpoints").glob("step-*"))) for run in (tmp_path, saved_run[0]))
    names = [f"state.{layer}.{number}" for layer in range(4) for number in range(4)]
    assert sorted(ours.carried_names()) == sorted(theirs.carried_names()) == names
    assert not set(names) & set(ours.names()) and "carried" not in ours.moment_kinds()
    for name in names:
        torch.testing.assert_close(ours.read_full(name, "carried"), theirs.read_full(name, "carried"))


def test_micro_batches_of_another_size_are_refused(saved_run: tuple[Path, list[float]]) -> None:
    with pytest.raises(RanksFailed, match=r"set training\.micro_batch_size back from 2 to 4"):
        resume_under(Layout(1, 0, micro_batch_size=2), saved_run[0])


def build(rank: int, world_size: int, layout: Layout, config: RunConfig) -> None:
    build_engine("lanes", config, layout)


def test_a_growing_batch_is_refused_on_every_stage() -> None:
    layout = Layout(2, 1, pipeline=2)
    config = config_of("lanes", layout, False)
    training = config.training.model_copy(update={"batch_ramp": (8, 8, 100)})
    with pytest.raises(RanksFailed, match=r"rank 1:[^-]*training\.batch_ramp is set, but .* carries a state"):
        run_ranks(build, 2, layout, config.model_copy(update={"training": training}), timeout_s=120)


@pytest.mark.parametrize("layout", [runs.ONE_RANK, runs.Layout(data=2, stage=2)], ids=str)
def test_an_elmo_goes_on_bitwise(tmp_path: Path, layout: runs.Layout) -> None:
    """With the states of its cells, drawn words, dropout and Adagrad's sums."""
    run = runs.Run("elmo", tmp_path / "data", layout, dropout=True, optimizer="adagrad")
    (tmp_path / "data").mkdir()
    run_ranks(runs.prepare, 1, runs.Run("elmo", run.folder))
    saved = run_ranks(runs.save, layout.world_size, run, tmp_path / "run", timeout_s=120)[0]
    assert run_ranks(runs.resume, layout.world_size, run, tmp_path / "run", timeout_s=120)[0]["next"] == saved["next"]
