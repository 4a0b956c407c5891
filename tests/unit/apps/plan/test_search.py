"""Layouts found: possible ones only, each fitting, the counts complete, the recommended one loadable as printed."""

from __future__ import annotations

import shlex
from itertools import pairwise
from typing import Any

import pytest

from ctxlm_ds.apps.plan.layouts import Layout, launch_command
from ctxlm_ds.apps.plan.plan import Planner
from ctxlm_ds.apps.plan.search import Search, candidates, require_plan, search_layouts
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
from ctxlm_ds.recipe.hardware import Cluster, find_gpu
from ctxlm_ds.recipe.json_source import load_deepspeed_json
from ctxlm_ds.recipe.layout import layout_problems
from ctxlm_ds.recipe.load import load_config

JSONS = {stage: load_deepspeed_json(f"zero{stage}") for stage in range(4)}


def cluster_of(nodes: int = 1, gpus: int = 8, gpu: str = "A100-80") -> Cluster:
    return Cluster(find_gpu(gpu), nodes, gpus)


def planner_of(recipe: str, cluster: Cluster, *changes: str) -> Planner:
    return Planner(load_config(recipe, changes), cluster, JSONS)


def gpt3(cluster: Cluster, **changes: Any) -> Planner:
    model = {
        "hidden_size": 12288, "num_layers": 96, "num_attention_heads": 96, "intermediate_size": 49152,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    settings = [f"model.{name}={value}" for name, value in model.items()]
    settings += ["data.seq_length=2048", "training.global_batch_size=1536", "training.micro_batch_size=1"]
    settings += [f"{name}={value}" for name, value in changes.items()]
    return planner_of("gpt2-small", cluster, *settings)


@pytest.fixture(scope="module")
def roberta_on_two_nodes() -> tuple[Planner, Search]:
    planner = planner_of("roberta-large", cluster_of(2))
    return planner, search_layouts(planner)


def test_every_candidate_is_counted_once(roberta_on_two_nodes: tuple[Planner, Search]) -> None:
    planner, found = roberta_on_two_nodes
    refused = sum(item.count for item in found.refused.values())
    assert len(found.plans) + len(found.too_large) + refused == len(list(candidates(planner)))
    assert len(found.plans) > 50


@pytest.mark.long
def test_every_plan_is_possible_and_fits(roberta_on_two_nodes: tuple[Planner, Search]) -> None:
    planner, found = roberta_on_two_nodes
    for plan in found.plans:
        check_config(planner.recipe_of(plan.layout), 16)
        assert plan.layout.world_size == 16
        assert plan.memory.total <= planner.cluster.usable_bytes
        assert 0 < plan.mfu < planner.cluster.gpu.matrix_efficiency
    assert all(slow.time.total >= fast.time.total for fast, slow in pairwise(found.plans))


def test_the_recommended_layout_is_what_its_settings_load(roberta_on_two_nodes: tuple[Planner, Search]) -> None:
    planner, found = roberta_on_two_nodes
    plan = require_plan(found, planner.cluster)
    settings = plan.layout.settings(planner.config.parallel.pipeline_layers)
    command = launch_command("roberta-large", f"zero{plan.layout.zero_stage}", settings, planner.cluster)
    words = shlex.split(command)
    config = load_config(words[words.index("--config") + 1], words[words.index("--set") + 1 :])
    assert config == planner.recipe_of(plan.layout)
    name = words[words.index("--deepspeed_config") + 1]
    settings_of_engine = build_deepspeed_config(config, load_deepspeed_json(name), 16)
    assert settings_of_engine["zero_optimization"]["stage"] == plan.layout.zero_stage
    assert settings_of_engine["gradient_accumulation_steps"] == plan.layout.num_micro_batches(
        config.training.global_batch_size
    )


def test_a_small_model_needs_no_splitting(roberta_on_two_nodes: tuple[Planner, Search]) -> None:
    """It fits one GPU, so that splitting layers would only add communication."""
    plan = require_plan(roberta_on_two_nodes[1], cluster_of(2))
    assert (plan.layout.tensor, plan.layout.pipeline) == (1, 1)
    assert plan.layout.zero_stage < 3


@pytest.mark.long
def test_a_model_of_175_billion_parameters_is_split() -> None:
    cluster = cluster_of(64)
    plan = require_plan(search_layouts(gpt3(cluster)), cluster)
    assert plan.layout.tensor * plan.layout.pipeline >= 8
    assert plan.memory.total <= cluster.usable_bytes


def test_refusals_have_their_reason() -> None:
    found = search_layouts(planner_of("bert-base", cluster_of()))
    assert "model.num_attention_heads 12" in found.refused["parallel.tensor_parallel_size"].text


def test_nothing_fits() -> None:
    cluster = cluster_of(1, 1, "V100-32")
    changes = {"training.precision": "fp16"}
    found = search_layouts(gpt3(cluster, **changes))
    with pytest.raises(ConfigError) as caught:
        require_plan(found, cluster)
    for words in ("no layout fits", "GiB are missing", "times as many"):
        assert words in str(caught.value)
    offload = Planner(gpt3(cluster, **changes).config, cluster, {3: load_deepspeed_json("zero3-offload")})
    with pytest.raises(ConfigError, match="even with zero3-offload it needs"):
        require_plan(found, cluster, search_layouts(offload))


def test_offload_is_named_where_it_is_the_way_out() -> None:
    shape = ["model.hidden_size=2048", "model.num_layers=48", "model.intermediate_size=8192"]
    changes = ["training.precision=fp16", *shape]
    cluster = cluster_of(1, 1, "V100-32")
    planner = planner_of("roberta-large", cluster, *changes)
    offload = Planner(planner.config, cluster, {3: load_deepspeed_json("zero3-offload")})
    found, offloaded = search_layouts(planner), search_layouts(offload)
    assert offloaded.plans
    with pytest.raises(ConfigError, match="with --deepspeed-config zero3-offload it fits"):
        require_plan(found, cluster, offloaded)


def test_nothing_is_possible() -> None:
    cluster = cluster_of(1, 7)
    found = search_layouts(planner_of("bert-base", cluster, "model.num_layers=2"))
    with pytest.raises(ConfigError, match="no layout is possible on 7 GPUs: .*1024 is not a multiple"):
        require_plan(found, cluster)


def contexts_of(planner: Planner) -> set[int]:
    return {layout.context for layout in candidates(planner)}


def test_ranks_share_rows_that_are_long_or_fewer_than_ranks() -> None:
    short = planner_of("bert-base", cluster_of())
    assert contexts_of(short) == {1}
    few = planner_of("bert-base", cluster_of(2), "training.global_batch_size=8", "training.micro_batch_size=1")
    assert all(one.data * one.context > 8 for one in candidates(few) if one.context > 1)
    assert contexts_of(few) == {1, 2, 4, 8}
    long = planner_of("modernbert-base-phase2", cluster_of())
    assert contexts_of(long) == {1, 2, 4, 8}
    assert all(one.tensor * one.context <= 8 for one in candidates(long))


@pytest.mark.soak
def test_a_batch_of_few_long_rows_is_shared() -> None:
    """Two rows of 8,192 positions for eight GPUs: a quarter of the positions on each."""
    changes = "training.global_batch_size=2", "training.micro_batch_size=1"
    found = search_layouts(planner_of("modernbert-large-phase2", cluster_of(), *changes))
    best = require_plan(found, cluster_of()).layout
    assert (best.data, best.context, best.tensor) == (2, 4, 1)
    only = {plan.layout.context: plan for plan in found.plans if plan.layout.tensor == plan.layout.pipeline == 1}
    assert only.keys() == {4, 8}


def test_ranks_that_share_a_row_take_half_of_its_memory_and_time() -> None:
    """Smaller products are slower for their size."""
    changes = "training.global_batch_size=1", "training.micro_batch_size=1"
    planner = planner_of("modernbert-large-phase2", cluster_of(1, 2), *changes)
    alone, shared = (planner.weigh(Layout(1, context=context)) for context in (1, 2))
    assert shared.memory.activations == pytest.approx(alone.memory.activations / 2, rel=0.06)
    assert shared.time.compute == pytest.approx(alone.time.compute / 2, rel=0.15)
    assert 0.0 == alone.time.context < shared.time.context < 0.1 * shared.time.compute


def test_a_model_whose_rows_cannot_be_shared_is_refused_with_the_reason() -> None:
    changes = "data.seq_length=16", "training.global_batch_size=1", "training.micro_batch_size=1"
    planner = planner_of("elmo-small", cluster_of(1, 2), *changes)
    shared = [layout for layout in candidates(planner) if layout.context > 1]
    for layout in shared:
        problem = next(layout_problems(planner.recipe_of(layout), 2, layout.zero_stage))
        assert (problem.path, "read complete rows" in problem.text) == ("parallel.context_parallel_size", True)
    assert shared
