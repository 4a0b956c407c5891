"""A layout as a recipe's settings and as a command, and the values of a DeepSpeed JSON that memory depends on."""

from __future__ import annotations

import shlex

import pytest

from ctxlm_ds.apps.plan.layouts import Layout, launch_command
from ctxlm_ds.apps.plan.plan import Planner
from ctxlm_ds.recipe.hardware import Cluster, find_gpu
from ctxlm_ds.recipe.load import load_config

SPLIT = Layout(4, 2, 3, 1, 8, recompute=True, sequence_parallel=True)
SHARED = Layout(2, 2, micro_batch_size=4, context=2)


def test_ranks_and_micro_batches() -> None:
    assert SPLIT.world_size == 24 and SPLIT.num_micro_batches(256) == 8
    assert str(SPLIT) == "dp 4, tp 2, pp 3, ZeRO 1, micro-batch 8, recomputation, sequence parallelism"
    assert (SHARED.world_size, SHARED.replicas, SHARED.num_micro_batches(256)) == (8, 4, 32)
    assert str(SHARED) == "dp 2, cp 2, tp 2, pp 1, ZeRO 1, micro-batch 4"
    assert str(Layout(8)) == "dp 8, tp 1, pp 1, ZeRO 1, micro-batch 1"


@pytest.mark.parametrize("layout", [SPLIT, SHARED, Layout(8, micro_batch_size=2), Layout(1, 1, 2)])
@pytest.mark.parametrize("given", [[], ["parallel.pipeline_layers=[4,8]", "parallel.pipeline_parallel_size=2"]])
def test_what_is_applied_is_what_the_printed_settings_load(layout: Layout, given: list[str]) -> None:
    recipe = load_config("bert-base", given)
    applied = Planner(recipe, Cluster(find_gpu("A100-80"), 1, 8)).recipe_of(layout)
    assert load_config("bert-base", [*given, *layout.settings(recipe.parallel.pipeline_layers)]) == applied
    parallel = applied.parallel
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size) == (layout.tensor, layout.pipeline)
    assert parallel.context_parallel_size == layout.context
    assert parallel.pipeline_layers == ([4, 8] if given and layout.pipeline == 2 else None)
    assert applied.model == recipe.model and applied.data == recipe.data


@pytest.mark.parametrize(("nodes", "start"), [(1, "torchrun --standalone"), (3, "torchrun --nnodes 3")])
def test_the_command_is_one_that_a_shell_reads(nodes: int, start: str) -> None:
    command = launch_command("my recipe.yaml", "zero2", ["run_dir=/a b", "x=1"], Cluster(find_gpu("A100-80"), nodes, 8))
    words = shlex.split(command)
    assert command.startswith(start) and words[words.index("--nproc-per-node") + 1] == "8"
    after = words[words.index("ctxlm_ds.pretrain") + 1 :]
    assert after == ["--config", "my recipe.yaml", "--deepspeed_config", "zero2", "--set", "run_dir=/a b", "x=1"]
