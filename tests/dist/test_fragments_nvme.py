"""ZeRO-3 with weights, moments and parameters on an NVMe disk (any folder, to DeepSpeed): the numbers of memory.

The operator takes seven minutes of a core to compile, a sixth of all tests, so that these are tests of `make soak`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.process.launch import use_own_build_folder
from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.schema import RunConfig, TrainingConfig
from ctxlm_ds.training.engine.engine import Engine
from tests.dist.runner import run_ranks
from tests.dist.states import SAVED_STEP, assert_states_equal, resume_and_train, train_and_save
from tests.dist.test_anomalies import check_going_back, check_refused
from tests.dist.test_background_save import check_both_ways
from tests.dist.training import GLOBAL_BATCH, SEQ_LENGTH, build_engine, tiny_config, train
from tests.sections import model_section

pytestmark = [pytest.mark.dist, pytest.mark.soak]
STEPS = 2
SUB_GROUP = 300_000
"""Elements: the word embedding, above the 1 MiB that DeepSpeed swaps, is a sub-group of its own."""


@pytest.fixture(scope="module", autouse=True)
def async_io() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("libaio's headers are not installed (apt-get install libaio-dev)")
    if not list(use_own_build_folder().glob("async_io/*.so")):
        pytest.skip("DeepSpeed's async_io is not built (minutes; a first run with infinity.json builds it)")


@dataclass(frozen=True)
class Swapped:
    """A run with its states on the disk; the same in memory without a folder."""

    folder: Path | None
    world_size: int = 2
    precision: str = "fp32"
    optimizer: str = "adamw"
    parameters: bool = False

    def config(self, run_dir: Path) -> RunConfig:
        # DeepSpeed swaps shards of at least 1 MiB; in bf16 that takes twice the rows.
        rows = 9000 * (2 if self.precision == "bf16" else 1)
        model = model_section(
            family="bert", vocab_size=rows, hidden_size=64, num_layers=2, num_attention_heads=2, intermediate_size=128,
            max_position_embeddings=SEQ_LENGTH, hidden_dropout=0.1, attention_dropout=0.1,
        )  # fmt: skip
        training = TrainingConfig(global_batch_size=GLOBAL_BATCH, micro_batch_size=4, precision=self.precision)
        optimizer = choices.OPTIMIZER.make(name=self.optimizer, learning_rate=0.01, weight_decay=0.1)
        return tiny_config(model=model, training=training, optimizer=optimizer, run_dir=str(run_dir))

    def user_json(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": 3, "sub_group_size": SUB_GROUP, "offload_optimizer": {"device": "cpu"}}
        if self.folder is not None:
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(self.folder)}
        if self.folder is not None and self.parameters:
            zero["offload_param"] = {
                "device": "nvme", "nvme_path": str(self.folder), "buffer_size": 1_000_000, "max_in_cpu": 0,
            }  # fmt: skip
        return {"zero_optimization": zero}


def swap_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.swp"))


CASES = [
    Swapped(None, 2, "bf16"),
    Swapped(None, 1, optimizer="lamb"),
    Swapped(None, 1, parameters=True),
    Swapped(None, 2),
    Swapped(None, 2, "bf16", "lamb", parameters=True),
]


@pytest.mark.parametrize("memory", CASES, ids=str)
def test_losses_and_weights_are_those_of_memory(tmp_path: Path, memory: Swapped) -> None:
    disk = Swapped(tmp_path, memory.world_size, memory.precision, memory.optimizer, memory.parameters)
    results = [
        run_ranks(train, run.world_size, run.config(tmp_path / "run"), run.user_json(), STEPS, timeout_s=120)[0]
        for run in (memory, disk)
    ]
    assert results[1]["losses"] == pytest.approx(results[0]["losses"], rel=1e-6)
    assert results[1]["norms"] == pytest.approx(results[0]["norms"], rel=1e-6)
    for name, weight in results[0]["weights"].items():
        torch.testing.assert_close(results[1]["weights"][name], weight, rtol=1e-6, atol=1e-7, msg=name)
    files = swap_files(tmp_path)
    assert {name.split("-")[0] for name in files if name.startswith("exp_avg")} == {"exp_avg", "exp_avg_sq"}
    assert any("param" in name for name in files) == memory.parameters


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_goes_on_bitwise(tmp_path: Path, world_size: int) -> None:
    run = Swapped(tmp_path, world_size, parameters=True)
    config = run.config(tmp_path / "run")
    arguments = (config, tmp_path / "run", SAVED_STEP + 2)
    saved = run_ranks(train_and_save, world_size, run, *arguments, timeout_s=120)[0]
    resumed = run_ranks(resume_and_train, world_size, run, *arguments, timeout_s=120)[0]
    assert_states_equal(saved, resumed)
    assert resumed["losses"] == saved["losses"]
    in_memory = run_ranks(resume_and_train, world_size, Swapped(None), *arguments, timeout_s=120)[0]
    assert in_memory["losses"] == pytest.approx(saved["losses"], rel=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_beside_training_holds_the_same_bytes(tmp_path: Path, world_size: int) -> None:
    run = Swapped(tmp_path, world_size, parameters=True)
    check_both_ways(world_size, run.config(tmp_path / "run"), run.user_json(), tmp_path / "saved")


@pytest.mark.parametrize("run", [Swapped(None, 1), Swapped(None, 2, "bf16", parameters=True)], ids=str)
def test_a_refused_update_leaves_no_trace(tmp_path: Path, run: Swapped) -> None:
    check_refused(maker(run, tmp_path), run.world_size, ["spike", "infinite_gradient"])


@pytest.mark.parametrize("run", [Swapped(None, 1), Swapped(None, 2, "bf16", parameters=True)], ids=str)
def test_a_live_run_goes_back_as_a_new_process_does(tmp_path: Path, run: Swapped) -> None:
    check_going_back(maker(run, tmp_path), run.world_size, tmp_path / "run")


def maker(run: Swapped, folder: Path) -> Callable[[], Engine]:
    """Builds an engine with a folder of its own on the disk."""
    numbers = itertools.count()

    def make() -> Engine:
        disk = folder / f"disk-{next(numbers)}"
        disk.mkdir(exist_ok=True)
        swapped = dataclasses.replace(run, folder=disk)
        return build_engine(swapped.config(folder / "run"), swapped.user_json())

    return make
