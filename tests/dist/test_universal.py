"""DeepSpeed's universal format against DeepSpeed itself: its engine loads ours, its converter's output becomes ours."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from ctxlm_ds.checkpoint.manifest import verify
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.checkpoint.universal import from_universal, to_universal
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import ModelBuild
from ctxlm_ds.models.program import build_program
from ctxlm_ds.parallel.placement import shard_of
from ctxlm_ds.process.launch import clear_stale_build_locks, quiet_libraries
from ctxlm_ds.recipe.load import dump_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.engine.runtime import init_process_group
from tests.checkpoints import make_config, make_tokenizer, outputs_of
from tests.dist.runner import run_ranks
from tests.rank_files import KINDS, STEP, Layout, Values, local_shape, random_states, splits_of, write_as_ranks

pytestmark = pytest.mark.dist
MOMENTS = KINDS[1:]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer("wordpiece", tmp_path_factory.mktemp("tokenizer") / "t")


@pytest.fixture(scope="module")
def config(tokenizer: Path) -> RunConfig:
    return make_config("bert_nsp", tokenizer)


@pytest.fixture(scope="module")
def values(config: RunConfig) -> Values:
    return random_states(config)


@pytest.fixture(scope="module")
def run(config: RunConfig, values: Values, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tensor-parallel layout under ZeRO-3."""
    return write_as_ranks(tmp_path_factory.mktemp("ours") / "run", config, values, Layout(2, 1, 2, 3), tokenizer)


@pytest.fixture(scope="module")
def universal(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("universal") / "out"
    to_universal(run, folder)
    return folder


def plain_engine(config: RunConfig, stage: int, precision: str, universal: bool) -> Any:
    """DeepSpeed's engine over our layers as a user without our engine would make it; two parameter groups."""
    quiet_libraries()
    clear_stale_build_locks()
    init_process_group()
    kernels = KernelSet({}, "cpu", torch.float32)
    model = build_program(config.model, ModelBuild(outputs_of(config), kernels)).module(1)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
        "steps_per_print": 2**31 - 1,
    }
    if precision == "bf16":
        settings["bf16"] = {"enabled": True}
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=False)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)[0]


def train_steps(engine: Any, rank: int, steps: int) -> None:
    """Some loss in which every parameter has a part."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(5, 50, (2, 12), generator=generator)
        ones, places = torch.ones_like(ids), torch.arange(12).expand(2, 12)
        starts = torch.tensor([[0, 12]]).expand(2, 2)
        predicted, first = torch.tensor([[1, 5], [3, 4]]), torch.zeros(2, 1, dtype=torch.long)
        fields = {
            "input_ids": ids, "token_type_ids": ones * 0, "position_ids": places, "sequence_ids": ones,
            "sequence_starts": starts, "prediction_positions": predicted, "cls_positions": first,
        }  # fmt: skip
        inputs = tuple(fields[name] for name in engine.module.inputs)
        engine.backward(sum(output.float().square().mean() for output in engine(inputs)))
        engine.step()


def whole_states(engine: Any) -> Values:
    return {
        name: {
            "weight": safe_get_full_fp32_param(parameter).clone(),
            **{kind: safe_get_full_optimizer_state(parameter, kind).clone() for kind in MOMENTS},
        }
        for name, parameter in engine.module.named_parameters()
    }


def load_ours(rank: int, world_size: int, config: RunConfig, folder: Path, stage: int, precision: str) -> Any:
    engine = plain_engine(config, stage, precision, universal=True)
    path, client = engine.load_checkpoint(str(folder))
    assert path is not None and client["ctxlm_ds"]["data"] == {"train_rows": 9}
    loaded = whole_states(engine)
    computed_with = {name: value.detach().float().clone() for name, value in engine.module.named_parameters()}
    steps = []
    decay = [group["weight_decay"] for group in engine.optimizer.param_groups]
    if stage < 3:
        train_steps(engine, rank, 1)
        steps = [float(state["step"]) for state in engine.optimizer.optimizer.state.values()]
    return loaded, computed_with, engine.global_steps, decay, steps


LOADS = [(1, "bf16"), (3, "fp32"), *(pytest.param(stage, "fp32", marks=pytest.mark.soak) for stage in (1, 2))]


@pytest.mark.parametrize(("stage", "precision"), LOADS)
def test_a_deepspeed_engine_loads_ours(
    universal: Path, config: RunConfig, values: Values, stage: int, precision: str
) -> None:
    arguments = (config, universal, stage, precision)
    for loaded, computed_with, global_steps, decay, steps in run_ranks(load_ours, 2, *arguments, timeout_s=120):
        assert loaded.keys() == values.keys()
        for name, kinds in values.items():
            for kind, value in kinds.items():
                assert torch.equal(loaded[name][kind].reshape(value.shape), value), (name, kind)
            if stage < 3:
                expected = value_in(kinds["weight"], precision)
                assert torch.equal(computed_with[name], expected), name
        assert global_steps == STEP + bool(steps) and decay == [0.1, 0.0]
        # Ours goes on counting where we stood.
        assert all(step == STEP + 1 for step in steps)


def value_in(weight: torch.Tensor, precision: str) -> torch.Tensor:
    return weight.bfloat16().float() if precision == "bf16" else weight


def test_deepspeed_cuts_ours_for_tensor_parallel_ranks(universal: Path, config: RunConfig, values: Values) -> None:
    """Its own slicing function gives each rank what our placement says."""
    splits = splits_of(config)
    tag = (universal / "latest_universal").read_text()
    for name, kinds in values.items():
        value = kinds["weight"]
        for size in (2, 4):
            for rank in range(size):
                shard = shard_of(name, splits[name], tuple(value.shape), size, rank)
                if shard.num_elements * size != value.numel() and splits[name] is not None:
                    continue
                target = torch.zeros(shard.num_elements)
                parameter = SimpleNamespace(shape=torch.Size(local_shape(shard)), numel=lambda t=target: t.numel())
                parameter._hp_mapping = SimpleNamespace(
                    lp_fragment_address=SimpleNamespace(start=0, numel=target.numel()),
                    get_hp_fragment=lambda t=target: t,
                )
                load_hp_checkpoint_state(parameter, str(universal / tag / "zero" / name), rank, size)
                assert torch.equal(target, shard.extract(value)), (name, size, rank)
                for kind in MOMENTS:
                    assert torch.equal(parameter._hp_mapping.optim_fragment[kind], shard.extract(kinds[kind]))


def save_theirs(rank: int, world_size: int, config: RunConfig, folder: Path, stage: int, precision: str) -> Values:
    engine = plain_engine(config, stage, precision, universal=False)
    train_steps(engine, rank, 3)
    engine.save_checkpoint(str(folder), tag="global_step3")
    if stage < 3:
        # It links the states of the parameters during the first group's first update, when the second has none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    return whole_states(engine)


CONVERSIONS = [(2, "bf16"), (3, "fp32"), pytest.param(1, "fp32", marks=pytest.mark.soak)]


@pytest.mark.parametrize(("stage", "precision"), CONVERSIONS)
def test_what_deepspeeds_converter_wrote_is_imported(
    config: RunConfig, stage: int, precision: str, tmp_path: Path
) -> None:
    saved = run_ranks(save_theirs, 2, config, tmp_path / "theirs", stage, precision, timeout_s=120)[0]
    arguments = argparse.Namespace(
        input_folder=str(tmp_path / "theirs" / "global_step3"), output_folder=str(tmp_path / "u" / "global_step3"),
        num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    ds_to_universal.main(arguments)
    (tmp_path / "recipe.yaml").write_text(dump_config(config))
    assert not from_universal(tmp_path / "u", tmp_path / "ours", tmp_path / "recipe.yaml")
    folder = tmp_path / "ours" / "checkpoints" / "step-00000003"
    verify(folder)
    reader = CheckpointReader(folder)
    assert reader.scalars == {"optimizer_updates": 3}
    assert set(reader.names()) == set(saved) and tuple(reader.moment_kinds()) == MOMENTS
    for name, kinds in saved.items():
        for kind, value in kinds.items():
            assert torch.equal(reader.read_full(name, kind).flatten(), value.flatten()), (name, kind)
