"""The seconds of a step: idle time of a pipeline, recomputation, days."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.apps.plan.plan import Planner
from ctxlm_ds.apps.plan.timing import COLLECTIVE_LATENCY_S
from ctxlm_ds.models.meter import Platform
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.training.measure import measure, training_flops_per_row, useful_flops_per_row
from tests.unit.apps.plan.test_plan import weigh
from tests.unit.apps.plan.test_search import JSONS, cluster_of


def test_the_pipelines_idle_time() -> None:
    config = load_config("bert-large", ["training.global_batch_size=64", "parallel.pipeline_partition=uniform"])
    time = weigh(config, Layout(1, 1, 8, 1, 4)).time
    assert time.bubble == pytest.approx((time.compute + time.pipeline) * 7 / 16)


def test_recomputation_adds_a_forward_pass() -> None:
    config = load_config("bert-large", ["training.global_batch_size=256"])
    layout = Layout(8, micro_batch_size=32)
    kept, again = weigh(config, layout), weigh(config, replace(layout, recompute=True))
    assert 1.25 < again.time.compute / kept.time.compute < 4 / 3
    assert again.mfu < kept.mfu


def test_a_vocabulary_that_is_not_aligned_costs_time() -> None:
    """The product with 50,257 words is about a quarter of the step's operations."""
    words = "training.global_batch_size=32"
    configs = (load_config("gpt2-small", [words, f"parallel.vocab_multiple={multiple}"]) for multiple in (1, 128))
    unaligned, aligned = (weigh(config, Layout(1, micro_batch_size=32)).time.compute for config in configs)
    assert 1.1 < unaligned / aligned < 1.3


def test_causal_attention_leaves_out_later_positions() -> None:
    config = load_config("gpt2-small", ["training.global_batch_size=32"])
    plan = weigh(config, Layout(1, micro_batch_size=32))
    length, model = config.data.seq_length, config.model
    pairs = 12 * model.num_layers * model.hidden_size * length * length
    left_out = pairs * (length - 1) / (2 * length)
    useful = useful_flops_per_row(config)
    assert training_flops_per_row(measure(config)) - useful == pytest.approx(left_out, rel=1e-3)
    peak = cluster_of(1, 1).gpu.flops_per_s("bf16")
    assert plan.mfu == pytest.approx(32 * useful / plan.time.total / peak)
    products = [p for layer in measure(config).layers for p in layer.products(1) if p.computed != p.flops]
    assert 3 * sum(p.flops - p.computed for p in products) == pytest.approx(left_out, rel=1e-3)
    before_flash = Planner(config, cluster_of(1, 1), platform=Platform(keeps_scores=True))
    assert before_flash.flops == 32 * training_flops_per_row(measure(config))


def test_rows_that_are_shared_cost_their_exchange() -> None:
    """In full, by NVLink in a node; both forward and backward, of a half of every tensor."""
    config = load_config(
        "bert-large", ["training.global_batch_size=16", "training.micro_batch_size=2", "data.seq_length=512"]
    )
    alone, shared = (
        weigh(config, Layout(8, micro_batch_size=2)),
        weigh(config, Layout(4, micro_batch_size=2, context=2)),
    )
    (exchanged,) = (m for m in shared.messages if m.operation == "all_to_all")
    hidden = 2 * 512 // 2 * config.model.hidden_size * 2
    assert exchanged.num_bytes == 2 * config.model.num_layers * 2 * 4 * hidden
    assert alone.time.context == 0.0 and alone.axis_bytes("context") == 0.0
    sent_s = shared.axis_bytes("context") / cluster_of().nvlink_bytes_per_s
    calls = shared.time.context - sent_s
    assert calls == pytest.approx(2 * (4 * config.model.num_layers + 4) * COLLECTIVE_LATENCY_S)
    assert shared.time.total > shared.time.compute + shared.time.context
    # Gradients are averaged over all copies of the weights.
    assert shared.axis_bytes("data") == alone.axis_bytes("data")


def test_rows_that_nodes_share_are_exchanged_by_their_adapters() -> None:
    config = load_config(
        "bert-large", ["training.global_batch_size=16", "training.micro_batch_size=2", "data.seq_length=512"]
    )
    apart = Planner(config, cluster_of(8, 1), JSONS).weigh(Layout(4, micro_batch_size=2, context=2))
    inside = weigh(config, Layout(4, micro_batch_size=2, context=2))
    assert apart.messages == inside.messages and apart.time.context > inside.time.context
