"""MFU: the planner's operations over a peak that is known, else no figure."""

from __future__ import annotations

import pytest

from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.training.hooks.hooks import StepSpeed
from ctxlm_ds.training.hooks.metrics import step_figures
from ctxlm_ds.training.hooks.utilization import peak_row_seconds, published_peak_tflops
from ctxlm_ds.training.measure import useful_flops_per_row
from tests.unit.training.hooks.test_metrics import metrics_of


def test_mfu_is_six_operations_a_weight_and_token() -> None:
    config = load_config("gpt2-laptop", ["logging.peak_tflops=2.0", "model.vocab_size=8192"])
    seconds = peak_row_seconds(
        config.logging.peak_tflops, config.training.precision, 4, lambda: useful_flops_per_row(config)
    )
    model, tokens = config.model, config.data.seq_length
    width, layers = model.width, model.num_blocks
    assert seconds is not None and width is not None
    weights = 12 * layers * width**2 + 8192 * width
    attention = layers * 2 * width * (tokens + 1)  # scores and mixing of the positions that are seen, on average
    assert seconds == pytest.approx(tokens * (6 * weights + 3 * attention) / 8e12, rel=2e-3)
    figures = step_figures(metrics_of(1), StepSpeed(200.0, 0.5, rows_per_second=0.25 / seconds), seconds)
    assert figures["mfu"] == 0.25
    assert figures["rows_per_second"] == pytest.approx(0.25 / seconds, rel=1e-2)


def test_no_figure_without_a_peak() -> None:
    assert published_peak_tflops("NVIDIA H100 80GB HBM3", "bf16") == 989.0
    assert published_peak_tflops("NVIDIA H100 PCIe", "bf16") is None
    assert published_peak_tflops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5
    assert "mfu" not in step_figures(metrics_of(1), StepSpeed(200.0, 0.5, 3.0))
