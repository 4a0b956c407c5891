"""A layout's plan: memory, idle time and days follow theory."""

from __future__ import annotations

from collections import Counter

import pytest

from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.apps.plan.plan import Plan, Planner
from ctxlm_ds.apps.plan.states import Partition, StageParameters
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.zero import ZeroSettings
from ctxlm_ds.training.measure import measure, training_flops_per_row
from tests.unit.apps.plan.test_search import JSONS, cluster_of


def weigh(config: RunConfig, layout: Layout) -> Plan:
    nodes = max(1, layout.world_size // 8)
    return Planner(config, cluster_of(nodes, layout.world_size // nodes), JSONS).weigh(layout)


def test_memory_falls_as_theory_says() -> None:
    config = load_config("bert-large", ["training.global_batch_size=256"])
    whole = weigh(config, Layout(8, micro_batch_size=4)).memory
    two = weigh(config, Layout(8, micro_batch_size=4, zero_stage=2)).memory
    three = weigh(config, Layout(8, micro_batch_size=4, zero_stage=3)).memory
    assert (two.parameters, two.optimizer) == (whole.parameters, whole.optimizer)
    assert two.gradients == pytest.approx(whole.gradients / 8, rel=1e-3)
    assert three.parameters == pytest.approx(whole.parameters / 8, rel=1e-3)
    split = weigh(config, Layout(8, 4, micro_batch_size=4)).memory
    assert whole.parameters / 4 < split.parameters < 1.05 * whole.parameters / 4
    recomputed = weigh(config, Layout(8, micro_batch_size=4, recompute=True)).memory
    assert recomputed.activations < 0.35 * whole.activations
    assert recomputed.parameters == whole.parameters


def test_a_pipelines_first_stage_holds_a_micro_batch_for_every_stage() -> None:
    config = load_config("bert-large", ["training.global_batch_size=256", "parallel.pipeline_partition=uniform"])
    few = weigh(config, Layout(1, 1, 4, 1, 128)).memory
    many = weigh(config, Layout(1, 1, 4, 1, 16)).memory
    # Two micro-batches of 128 rows are held at most, and four of 16.
    assert few.activations / many.activations == pytest.approx(2 * 128 / (4 * 16), rel=0.05)


@pytest.mark.parametrize(
    ("stage", "offload", "elements"), [(0, "none", 1000), (1, "none", 190), (1, "cpu", 0), (3, "none", 190)]
)
def test_adafactors_update_holds_the_largest_matrix_twice(stage: int, offload: str, elements: int) -> None:
    config = load_config("bert-base", ["optimizer.name=adafactor"])
    zero = {"stage": stage, "offload_optimizer": {"device": offload}}
    settings = ZeroSettings.of_json({"zero_optimization": zero}, 8)
    parameters = StageParameters((Counter({1000: 3}), Counter({8: 2})))
    alone, shared = (Partition(config.training, config.optimizer, settings, ranks) for ranks in (1, 16))
    assert alone.workspace_bytes(parameters) == (8 * 1000 if elements else 0)
    assert shared.workspace_bytes(parameters) == 8 * elements
    other = load_config("bert-base").optimizer
    assert Partition(config.training, other, settings, 1).workspace_bytes(parameters) == 0


def test_days_and_utilisation_follow_from_the_step() -> None:
    config = load_config("bert-base")
    plan = weigh(config, Layout(8, micro_batch_size=32))
    assert plan.days == pytest.approx(plan.time.total * config.training.max_steps / 86_400)
    per_row = training_flops_per_row(measure(config))
    assert plan.mfu == pytest.approx(1024 * per_row / plan.time.total / (8 * 312e12), rel=1e-3)


def test_the_days_of_a_growing_batch_are_those_of_its_micro_batches() -> None:
    """Fewer than those of full steps; more than in proportion to its rows, because each step has an update."""
    layout = Layout(8, micro_batch_size=4)
    base = ["training.global_batch_size=256", "training.micro_batch_size=4", "training.max_steps=1000"]
    growing = load_config("bert-base", [*base, "training.batch_ramp=[32,32,100000]"])
    plain, ramped = (weigh(config, layout) for config in (load_config("bert-base", base), growing))
    rows = growing.training.rows_after(1000)
    assert rows < 200_000 and ramped.time == plain.time
    assert plain.days * rows / 256_000 < ramped.days < plain.days


@pytest.mark.parametrize("stage", [1, 3])
def test_muon_saves_a_moment_and_adds_its_iterations_and_messages(stage: int) -> None:
    layout = Layout(8, micro_batch_size=4, zero_stage=stage)
    adamw, muon = (
        weigh(load_config("bert-large", ["training.global_batch_size=256", f"optimizer.name={name}"]), layout)
        for name in ("adamw", "muon")
    )
    # 24 layers of 12 squares of the width.
    matrices = 24 * 12 * 1024**2
    assert adamw.memory.optimizer - muon.memory.optimizer == pytest.approx(4 * matrices / 8, rel=1e-3)
    # Query, key, value and output are 4 squares, the others 2 of 1 x 4: 6 and 18 products of 1,024 a side.
    flops = 24 * 5 * (4 * 6 + 2 * 18) * 1024**3
    gpu = cluster_of(1, 8).gpu
    seconds = flops / 8 / (gpu.flops_per_s("fp32") * gpu.matrix_efficiency)
    assert seconds < muon.time.update - adamw.time.update < 1.5 * seconds
    sent = [message for message in muon.messages if message.purpose == "matrices"]
    wanted = 2 * 4 * matrices / 8 * 7 / 8 if stage == 3 else 4 * 4 * 1024**2 / 2
    assert [message.num_bytes for message in sent] == [pytest.approx(wanted, rel=1e-3)]
    assert not [message for message in adamw.messages if message.purpose == "matrices"]
