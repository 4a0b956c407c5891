"""A run goes on from a reshaped checkpoint, and each rank reads files of its own alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.checkpoint.target_layout import Layout
from ctxlm_ds.checkpoint.layout_free import CheckpointReader
from ctxlm_ds.checkpoint.manager import CheckpointManager
from ctxlm_ds.checkpoint.reshape import reshape
from ctxlm_ds.checkpoint.tensor_file import TensorFileReader
from ctxlm_ds.checkpoint.training import TrainingCheckpoints
from ctxlm_ds.recipe.schema import CheckpointConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainingConfig
from tests.sections import data_section
from ctxlm_ds.training.engine import Engine
from ctxlm_ds.training.state import TrainState
from tests.dist.runner import run_ranks
from tests.dist.training import GLOBAL_BATCH, SEQ_LENGTH, build_engine, step_of, tiny_config

pytestmark = pytest.mark.dist
SAVED_STEP, STEPS = 3, 6


def config_of(layout: Layout) -> RunConfig:
    parallel = ParallelConfig(
        tensor_parallel_size=layout.tensor_parallel_size, pipeline_parallel_size=layout.pipeline_parallel_size
    )
    return tiny_config(
        training=TrainingConfig(global_batch_size=GLOBAL_BATCH, micro_batch_size=4, precision="fp32"),
        optimizer=OptimizerConfig(learning_rate=0.01, weight_decay=0.1),
        data=data_section(seq_length=SEQ_LENGTH),
        parallel=parallel,
    )


def engine_of(layout: Layout, run_dir: Path) -> tuple[Engine, TrainingCheckpoints]:
    config = config_of(layout)
    engine = build_engine(config, {"zero_optimization": {"stage": layout.zero_stage}})
    manager = CheckpointManager(run_dir, CheckpointConfig(), engine.topology)
    return engine, TrainingCheckpoints(manager, engine, config, run_dir / "tokenizer", {"train_rows": 100})


def losses(engine: Engine, start: int, stop: int) -> list[float]:
    rate = engine.config.optimizer.learning_rate
    return [engine.train_step(step_of(engine, step), step, rate).loss for step in range(start, stop)]


def save(rank: int, world_size: int, layout: Layout, run_dir: Path) -> list[float]:
    engine, checkpoints = engine_of(layout, run_dir)
    (run_dir / "tokenizer").mkdir(parents=True, exist_ok=True)
    losses(engine, 0, SAVED_STEP)
    engine.topology.barrier()
    checkpoints.save(TrainState(step=SAVED_STEP, rows_consumed=SAVED_STEP * GLOBAL_BATCH))
    return losses(engine, SAVED_STEP, STEPS)


def resume(rank: int, world_size: int, layout: Layout, run_dir: Path) -> Any:
    """Files that this rank read from, the elements it needed, and the losses that follow."""
    read: dict[str, int] = {}
    original = TensorFileReader.read_into

    def counted(self: TensorFileReader, key: str, length: int, first: int, target: torch.Tensor) -> None:
        read[self.path.name] = read.get(self.path.name, 0) + target.numel()
        original(self, key, length, first, target)

    engine, checkpoints = engine_of(layout, run_dir)
    TensorFileReader.read_into = counted  # type: ignore[method-assign]
    state = checkpoints.resume(checkpoints._manager.find_resumable())
    assert state is not None and state.step == SAVED_STEP
    whole = sum(1 for fragment in engine.fragments() if fragment.duplicate and fragment.length)
    return read, whole, losses(engine, SAVED_STEP, STEPS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    run_dir = tmp_path_factory.mktemp("saved")
    layout = Layout(1, 1, 2, 3)
    return run_dir, run_ranks(save, layout.world_size, layout, run_dir, timeout_s=120)[0]


LAYOUTS = [Layout(1, 1, 4, 1), Layout(2, 1, 2, 3), *(pytest.param(layout, marks=pytest.mark.soak) for layout in (
    Layout(1, 1, 2, 2), Layout(2, 1, 2, 1), Layout(2, 2, 1, 1), Layout(1, 1, 2, 0)))]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_run_goes_on_from_a_reshaped_checkpoint(
    saved: tuple[Path, list[float]], layout: Layout, tmp_path: Path
) -> None:
    run_dir, expected = saved
    reshape(run_dir, tmp_path / "new", layout)
    results = run_ranks(resume, layout.world_size, layout, tmp_path / "new", timeout_s=120)
    for rank, (read, duplicates, following) in enumerate(results):
        assert following == pytest.approx(expected, rel=1e-5)
        own = {f"weights-{rank:05d}.safetensors", f"moments-{rank:05d}.safetensors"}
        total = sum(read.values())
        # What another rank speaks for, and a few elements at the ends of flat partitions, lie elsewhere.
        if layout.zero_stage and not duplicates:
            assert sum(count for name, count in read.items() if name in own) >= 0.99 * total
            assert total > 0


def test_the_reshaped_numbers_are_those_that_were_saved(saved: tuple[Path, list[float]], tmp_path: Path) -> None:
    run_dir, _ = saved
    reshape(run_dir, tmp_path / "new", Layout(2, 2, 2, 1))
    name = f"checkpoints/step-{SAVED_STEP:08d}"
    before, after = CheckpointReader(run_dir / name), CheckpointReader(tmp_path / "new" / name)
    assert before.scalars() == after.scalars() and before.names() == after.names()
    for parameter in before.names():
        for kind in before.kinds(parameter):
            assert torch.equal(before.read_full(parameter, kind), after.read_full(parameter, kind))
