"""Predictions of published runs: one set of constants, near the runs that were measured on the training loop alone."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from ctxlm_ds.training.measure import describe
from tests.unit.apps.plan.published_runs import published_runs

pytestmark = pytest.mark.long


def ratios(source: str) -> list[float]:
    return [run.predicted() / run.published for run in published_runs() if run.source.startswith(source)]


def test_the_models_are_the_published_ones() -> None:
    checked = 0
    for run in published_runs():
        if size := re.search(r" ([\d.]+)B ", run.name):
            count = describe(run.config).num_parameters / 1e9
            assert abs(count / float(size[1]) - 1) < 0.03, run.name
            checked += 1
    assert checked == 12


def test_throughput_of_training_loops_is_met_within_a_third() -> None:
    for source in ("Narayanan", "Shoeybi", "DeepSpeed"):
        for ratio in ratios(source):
            assert 0.65 < ratio < 1.45


def test_megatrons_table_is_met_on_average_and_in_its_course() -> None:
    """Ten models on 32 to 3,072 GPUs: no trend of more than a sixth from the smallest to the largest."""
    found = ratios("Narayanan")
    mean = math.exp(sum(map(math.log, found)) / len(found))
    assert 0.85 < mean < 1.1
    assert max(found) / min(found) < 1.2


def test_days_of_whole_runs_are_of_the_right_order() -> None:
    """They contain what a plan does not know (data, evaluation, restarts, older code, the precision)."""
    for run in published_runs():
        if run.unit == "days":
            assert 0.15 < run.predicted() / run.published < 1.5, run.name


def test_the_table_of_the_documentation_has_these_predictions() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "planning.md").read_text(encoding="utf-8")
    for run in published_runs():
        predicted = run.predicted()
        numbers = f"{run.published:.3g} | {predicted:.3g} | {predicted / run.published:.2f}"
        assert f"| {run.name} | {run.source} | {run.unit} | {numbers} |" in page
