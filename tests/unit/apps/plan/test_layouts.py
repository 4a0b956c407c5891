"""A layout as a recipe's settings and as a command, and the values of a DeepSpeed JSON that memory depends on."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from ctxlm_ds.apps.plan.layouts import DEEPSPEED_BUCKET, Layout, ZeroSettings, launch_command
from ctxlm_ds.recipe.deepspeed import bucket_hints
from ctxlm_ds.recipe.hardware import Cluster, find_gpu
from ctxlm_ds.recipe.load import load_config

SPLIT = Layout(4, 2, 3, 1, 8, recompute=True, sequence_parallel=True)


def test_ranks_and_micro_batches() -> None:
    assert SPLIT.world_size == 24 and SPLIT.num_micro_batches(256) == 8
    assert str(SPLIT) == "dp 4, tp 2, pp 3, ZeRO 1, micro-batch 8, recomputation, sequence parallelism"
    assert str(Layout(8)) == "dp 8, tp 1, pp 1, ZeRO 1, micro-batch 1"


@pytest.mark.parametrize("layout", [SPLIT, Layout(8, micro_batch_size=2), Layout(1, 1, 2)])
@pytest.mark.parametrize("given", [[], ["parallel.pipeline_layers=[4,8]", "parallel.pipeline_parallel_size=2"]])
def test_what_is_applied_is_what_the_printed_settings_load(layout: Layout, given: list[str]) -> None:
    recipe = load_config("bert-base", given)
    applied = layout.apply(recipe)
    assert load_config("bert-base", [*given, *layout.settings(recipe)]) == applied
    parallel = applied.parallel
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size) == (layout.tensor, layout.pipeline)
    assert parallel.pipeline_layers == ([4, 8] if given and layout.pipeline == 2 else None)
    assert applied.model == recipe.model and applied.data == recipe.data


@pytest.mark.parametrize(("nodes", "start"), [(1, "torchrun --standalone"), (3, "torchrun --nnodes 3")])
def test_the_command_is_one_that_a_shell_reads(nodes: int, start: str) -> None:
    command = launch_command("my recipe.yaml", "zero2", ["run_dir=/a b", "x=1"], Cluster(find_gpu("A100-80"), nodes, 8))
    words = shlex.split(command)
    assert command.startswith(start) and words[words.index("--nproc-per-node") + 1] == "8"
    after = words[words.index("ctxlm_ds.pretrain") + 1 :]
    assert after == ["--config", "my recipe.yaml", "--deepspeed_config", "zero2", "--set", "run_dir=/a b", "x=1"]


def zero(**section: Any) -> ZeroSettings:
    return ZeroSettings.of_json({"zero_optimization": section}, 1024)


def test_defaults_are_deepspeeds() -> None:
    assert ZeroSettings.of_json({}, None).stage == 0
    found = zero(stage=3)
    assert (found.overlap_comm, found.reduce_bucket, found.prefetch_bucket) == (True, DEEPSPEED_BUCKET, 50_000_000)
    assert (found.persistence_threshold, found.max_reuse_distance) == (100_000, 1_000_000_000)
    assert not zero(stage=2).overlap_comm and zero(stage=2, overlap_comm=True).overlap_comm
    assert not (found.offload_optimizer or found.offload_parameters)


def test_given_sizes_and_those_that_follow_from_the_width() -> None:
    hints = bucket_hints(1024)
    found = zero(stage=3, reduce_bucket_size="auto", stage3_prefetch_bucket_size=7)
    assert (found.reduce_bucket, found.prefetch_bucket) == (hints["reduce_bucket_size"], 7)


@pytest.mark.parametrize(("device", "offloads"), [("cpu", True), ("nvme", True), ("none", False)])
def test_offloads(device: str, offloads: bool) -> None:
    found = zero(stage=3, offload_optimizer={"device": device}, offload_param={"device": device})
    assert (found.offload_optimizer, found.offload_parameters) == (offloads, offloads)
