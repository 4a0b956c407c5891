"""Runs that save and resume under one layout and another, for tests of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctxlm_ds.checkpoint.manager import CheckpointManager
from ctxlm_ds.checkpoint.training import TrainingCheckpoints
from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.schema import CheckpointConfig, KernelsConfig, ParallelConfig, RunConfig, TrainingConfig
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.loop.state import TrainState
from tests.dist.runner import run_ranks
from tests.dist.training import GLOBAL_BATCH, assembled, build_engine, gather_weights, step_of, tiny_config

SAVED_STEP, STEPS = 2, 4
DATA = {"train_rows": 100}
SAVED = TrainState(step=SAVED_STEP, rows_consumed=SAVED_STEP * GLOBAL_BATCH, tokens=77)


@dataclass(frozen=True)
class Layout:
    """How a run is laid out over ranks."""

    world_size: int
    stage: int
    precision: str = "fp32"
    offload: int = 0
    """Optimizer states in CPU memory (1), parameters too (2)."""
    kernel: str = "auto"
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sequence_parallel: bool = False
    micro_batch_size: int = 4
    family: str = "bert"
    dropout: float = 0.1
    heads: int = 2

    def __str__(self) -> str:
        data = self.world_size // (self.tensor * self.pipeline * self.context)
        words = [f"tp{self.tensor}", f"pp{self.pipeline}", f"dp{data}", f"zero{self.stage}", self.precision]
        words += [f"cp{self.context}"] * (self.context > 1)
        return "-".join(words + ["sp"] * self.sequence_parallel + ["offload"] * self.offload)

    def config(self, optimizer: str = "adamw", seed: int = 1234) -> RunConfig:
        training = TrainingConfig(
            global_batch_size=GLOBAL_BATCH, micro_batch_size=self.micro_batch_size, precision=self.precision, seed=seed,
            initial_loss_scale_power=8,
        )  # fmt: skip
        parallel = ParallelConfig(
            tensor_parallel_size=self.tensor, pipeline_parallel_size=self.pipeline,
            context_parallel_size=self.context, sequence_parallel=self.sequence_parallel,
        )  # fmt: skip
        config = tiny_config(
            self.family, self.dropout, training=training, kernels=KernelsConfig(optimizer=self.kernel),
            optimizer=choices.OPTIMIZER.make(name=optimizer, learning_rate=0.01, weight_decay=0.1), parallel=parallel,
        )  # fmt: skip
        return config.with_values("model", num_attention_heads=self.heads)

    def user_json(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage}
        offloaded = ("offload_optimizer", "offload_param")[: self.offload]
        return {"zero_optimization": zero | {name: {"device": "cpu"} for name in offloaded}}


def checkpoints_of(engine: Engine, config: RunConfig, run_dir: Path) -> TrainingCheckpoints:
    manager = CheckpointManager(run_dir, CheckpointConfig(), engine.topology)
    return TrainingCheckpoints(manager, engine, config, run_dir / "tokenizer", DATA)


def resume_newest(engine: Engine, config: RunConfig, run_dir: Path) -> TrainState | None:
    newest = CheckpointManager(run_dir, CheckpointConfig(), engine.topology).find_resumable()
    return checkpoints_of(engine, config, run_dir).resume(newest)


def some_steps(engine: Engine, start: int, stop: int) -> list[float]:
    rate = engine.config.optimizer.learning_rate
    return [engine.train_step(step_of(engine, step), step, rate).loss for step in range(start, stop)]


def gather_moments(engine: Engine) -> dict[str, torch.Tensor]:
    """Every parameter's whole moments by `NAME#KIND`, assembled from all ranks' fragments, on rank 0."""
    kinds = engine.moment_kinds()
    held = [(fragment, engine.optimizer_state(fragment.owner)) for fragment in engine.fragments()]
    pieces = [
        (f"{fragment.name}#{kind}", fragment.shard, fragment.start, fragment.moment(state, kind).clone().numpy())
        for fragment, state in held
        for kind in kinds[fragment.name]
    ]
    return assembled(engine, pieces, {})


def held_by(engine: Engine) -> dict[str, Any]:
    """Whole weights and moments, on rank 0, and what an engine counts."""
    return {"weights": gather_weights(engine), "moments": gather_moments(engine), "scalars": engine.scalars()}


def save_at(engine: Engine, config: RunConfig, run_dir: Path, state: TrainState) -> None:
    (run_dir / "tokenizer").mkdir(parents=True, exist_ok=True)
    engine.topology.all_reduce_max([0.0])
    checkpoints_of(engine, config, run_dir).save(state)


def train_and_save(
    rank: int, world_size: int, layout: Layout, config: RunConfig, run_dir: Path, steps: int = STEPS
) -> dict[str, Any]:
    """Save in the middle and go on: what the moment held, and the losses after it."""
    engine = build_engine(config, layout.user_json())
    some_steps(engine, 0, SAVED_STEP)
    save_at(engine, config, run_dir, SAVED)
    held = held_by(engine)
    losses = some_steps(engine, SAVED_STEP, steps)
    return {**held, "losses": losses, "last_weights": gather_weights(engine)}


def resume_and_train(
    rank: int, world_size: int, layout: Layout, config: RunConfig, run_dir: Path, steps: int = STEPS
) -> dict[str, Any]:
    """A new process that loads the newest checkpoint and trains to the same step."""
    engine = build_engine(config, layout.user_json())
    state = resume_newest(engine, config, run_dir)
    assert state is not None
    held = held_by(engine)
    losses = some_steps(engine, state.step, steps)
    return {**held, "state": state, "losses": losses, "last_weights": gather_weights(engine)}


def save_under(layout: Layout, run_dir: Path, optimizer: str = "adamw", steps: int = STEPS) -> dict[str, Any]:
    config = layout.config(optimizer)
    return run_ranks(train_and_save, layout.world_size, layout, config, run_dir, steps, timeout_s=120)[0]


def resume_under(layout: Layout, run_dir: Path, optimizer: str = "adamw", steps: int = STEPS) -> dict[str, Any]:
    config = layout.config(optimizer)
    return run_ranks(resume_and_train, layout.world_size, layout, config, run_dir, steps, timeout_s=120)[0]


def assert_states_equal(saved: dict[str, Any], resumed: dict[str, Any]) -> None:
    """Every weight, moment and counter bit for bit."""
    assert_same(resumed, saved)
    assert resumed["scalars"]["optimizer_updates"] == SAVED_STEP
    assert resumed["state"] == SAVED


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for group in ("weights", "moments"):
        assert found[group].keys() == expected[group].keys()
        for name, value in expected[group].items():
            assert value.isfinite().all(), name
            assert torch.equal(found[group][name], value), name
    assert found["scalars"] == expected["scalars"]
