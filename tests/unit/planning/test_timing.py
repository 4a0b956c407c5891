"""The seconds of a step: idle time of a pipeline, recomputation, days."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ctxlm_ds.planning.layouts import Layout
from ctxlm_ds.recipe.load import load_config
from tests.unit.planning.test_plan import weigh


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
