"""A checkpoint gives back weights, moments and the losses that follow, under the layout that wrote it and any other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.checkpoint.layout_free import CheckpointReader
from ctxlm_ds.checkpoint.manager import CheckpointManager
from ctxlm_ds.checkpoint.training import TrainingCheckpoints
from ctxlm_ds.config.schema import CheckpointConfig, KernelsConfig, OptimizerConfig, RunConfig, TrainingConfig
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.training.engine import Engine
from ctxlm_ds.training.state import TrainState
from tests.dist.runner import RanksFailed, run_ranks
from tests.dist.training import GLOBAL_BATCH, build_engine, gather_weights, step_for_rank, tiny_config

pytestmark = pytest.mark.dist
SAVED_STEP, STEPS = 3, 6
DATA = {"train_rows": 100}


@dataclass(frozen=True)
class Layout:
    """How a run is laid out over ranks."""

    world_size: int
    stage: int
    precision: str = "fp32"
    offload: bool = False
    kernel: str = "auto"

    def config(self, optimizer: str = "adamw", seed: int = 1234) -> RunConfig:
        training = TrainingConfig(
            global_batch_size=GLOBAL_BATCH, micro_batch_size=4, precision=self.precision, seed=seed,
            initial_loss_scale_power=8,
        )  # fmt: skip
        return tiny_config(
            dropout=0.1, training=training, kernels=KernelsConfig(optimizer=self.kernel),
            optimizer=OptimizerConfig(name=optimizer, learning_rate=0.01, weight_decay=0.1),
        )  # fmt: skip

    def user_json(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        return {"zero_optimization": zero}


def checkpoints_of(engine: Engine, config: RunConfig, run_dir: Path) -> TrainingCheckpoints:
    manager = CheckpointManager(run_dir, CheckpointConfig(), engine.topology)
    return TrainingCheckpoints(manager, engine, config, run_dir / "tokenizer", DATA)


def some_steps(engine: Engine, config: RunConfig, rank: int, world_size: int, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        batches = step_for_rank(step, config.training.micro_batch_size, rank, world_size)
        losses.append(engine.train_step(batches, step, config.optimizer.learning_rate).loss)
    return losses


def gather_moments(engine: Engine) -> dict[str, torch.Tensor]:
    """Every parameter's whole moments by `NAME#KIND`, assembled from all ranks' fragments."""
    own = []
    for fragment in engine.fragments():
        state = engine.optimizer_state(fragment.owner)
        own += [
            (f"{fragment.name}#{kind}", fragment.shape, fragment.start, fragment.moment(state, kind).clone())
            for kind in engine.moment_kinds()
        ]
    whole: dict[str, torch.Tensor] = {}
    for pieces in engine.topology.all_gather_object(own):
        for name, shape, start, values in pieces:
            flat = whole.setdefault(name, torch.full(shape, float("nan"))).view(-1)
            flat[start : start + values.numel()] = values
    return whole


def train_and_save(rank: int, world_size: int, layout: Layout, config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Save in the middle and go on: what the moment held, and the losses after it."""
    engine = build_engine(config, layout.user_json())
    some_steps(engine, config, rank, world_size, 0, SAVED_STEP)
    (run_dir / "tokenizer").mkdir(parents=True, exist_ok=True)
    engine.topology.barrier()
    state = TrainState(step=SAVED_STEP, rows_consumed=SAVED_STEP * GLOBAL_BATCH, tokens=77)
    checkpoints_of(engine, config, run_dir).save(state)
    held = {"weights": gather_weights(engine), "moments": gather_moments(engine), "scalars": engine.scalars()}
    losses = some_steps(engine, config, rank, world_size, SAVED_STEP, STEPS)
    return {**held, "losses": losses, "last_weights": gather_weights(engine)}


def resume_and_train(rank: int, world_size: int, layout: Layout, config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """A new process that loads the newest checkpoint and trains to the same step."""
    engine = build_engine(config, layout.user_json())
    state = checkpoints_of(engine, config, run_dir).resume()
    assert state is not None
    held = {"weights": gather_weights(engine), "moments": gather_moments(engine), "scalars": engine.scalars()}
    losses = some_steps(engine, config, rank, world_size, state.step, STEPS)
    return {**held, "state": state, "losses": losses, "last_weights": gather_weights(engine)}


def save_under(layout: Layout, run_dir: Path, optimizer: str = "adamw") -> dict[str, Any]:
    config = layout.config(optimizer)
    return run_ranks(train_and_save, layout.world_size, layout, config, run_dir, timeout_s=120)[0]


def resume_under(layout: Layout, run_dir: Path, optimizer: str = "adamw") -> dict[str, Any]:
    config = layout.config(optimizer)
    return run_ranks(resume_and_train, layout.world_size, layout, config, run_dir, timeout_s=120)[0]


def assert_states_equal(saved: dict[str, Any], resumed: dict[str, Any]) -> None:
    """Every weight, moment and counter bit for bit."""
    for group in ("weights", "moments"):
        assert resumed[group].keys() == saved[group].keys()
        for name, value in saved[group].items():
            assert not value.isnan().any()
            assert torch.equal(resumed[group][name], value), name
    assert resumed["scalars"] == saved["scalars"]
    assert resumed["scalars"]["optimizer_updates"] == SAVED_STEP
    assert resumed["state"] == TrainState(step=SAVED_STEP, rows_consumed=SAVED_STEP * GLOBAL_BATCH, tokens=77)


SAME = [
    ("adamw", Layout(2, 0)),
    ("adamw", Layout(2, 1, "bf16")),
    ("adamw", Layout(2, 2)),
    ("adamw", Layout(2, 2, offload=True)),
    ("adamw", Layout(2, 3, "bf16")),
    ("adamw", Layout(2, 3, "bf16", offload=True)),
    ("lamb", Layout(2, 1, "bf16")),
    ("lamb", Layout(2, 3)),
]


@pytest.mark.parametrize(("optimizer", "layout"), SAME, ids=str)
def test_the_same_layout_goes_on_bitwise(tmp_path: Path, optimizer: str, layout: Layout) -> None:
    saved = save_under(layout, tmp_path, optimizer)
    resumed = resume_under(layout, tmp_path, optimizer)
    assert_states_equal(saved, resumed)
    assert resumed["losses"] == saved["losses"]
    for name, weight in saved["last_weights"].items():
        assert torch.equal(resumed["last_weights"][name], weight), name


@pytest.fixture(scope="module", params=["adamw", "lamb"])
def optimizer(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def saved_run(optimizer: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two ranks, ZeRO 3: each parameter in two pieces."""
    run_dir = tmp_path_factory.mktemp(optimizer)
    return run_dir, save_under(Layout(2, 3), run_dir, optimizer)


OTHERS = [Layout(1, 0), Layout(4, 1), Layout(4, 3), Layout(2, 2, offload=True)]


@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_another_layout_goes_on_alike(optimizer: str, saved_run: tuple[Path, dict[str, Any]], layout: Layout) -> None:
    run_dir, saved = saved_run
    resumed = resume_under(layout, run_dir, optimizer)
    assert_states_equal(saved, resumed)
    assert resumed["losses"] == pytest.approx(saved["losses"], rel=1e-5)


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


def test_another_seed_is_refused_with_both_values(saved_run: tuple[Path, dict[str, Any]], optimizer: str) -> None:
    run_dir, _ = saved_run
    layout = Layout(1, 0)
    with pytest.raises(RanksFailed, match=r"training\.seed: 1234 in the checkpoint, 5 in the recipe") as failed:
        run_ranks(resume_and_train, 1, layout, layout.config(optimizer, seed=5), run_dir, timeout_s=60)
    assert CheckpointError.__name__ in str(failed.value)


def resume_scaler(rank: int, world_size: int, layout: Layout) -> float:
    """The loss scale of an engine that is given an fp16 run's scaler."""
    engine = build_engine(layout.config(), layout.user_json())
    engine.restore_scalars({"optimizer_updates": 3, "cur_scale": 4096.0, "cur_iter": 9, "last_overflow_iter": 2})
    return float(engine._deepspeed.optimizer.loss_scale)


def test_a_loss_scale_stays_out_of_other_precisions() -> None:
    for layout in (Layout(1, 2, "bf16"), Layout(1, 3)):
        assert run_ranks(resume_scaler, 1, layout, timeout_s=60) == [1.0]
