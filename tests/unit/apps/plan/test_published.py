"""Predictions of published runs: one set of constants, near the runs that were measured on the training loop alone."""

from __future__ import annotations

import math
from pathlib import Path

from ctxlm_ds.training.measure import describe
from tests.unit.apps.plan.published_runs import PublishedRun, published_runs

SIZES = {"1.7B": 1.7, "3.6B": 3.6, "7.5B": 7.5, "18.4B": 18.4, "39.1B": 39.1, "76.1B": 76.1, "145.6B": 145.6,
         "310.1B": 310.1, "529.6B": 529.6, "1008B": 1008.0, "1.2B": 1.2, "8.3B": 8.3}  # fmt: skip


def ratios(source: str) -> list[float]:
    return [run.predicted() / run.published for run in published_runs() if run.source.startswith(source)]


def by_size(run: PublishedRun) -> float | None:
    return next((SIZES[word] for word in run.name.split() if word in SIZES), None)


def test_the_models_are_the_published_ones() -> None:
    checked = 0
    for run in published_runs():
        billions = by_size(run)
        if billions is not None:
            count = describe(run.config).num_parameters / 1e9
            assert abs(count / billions - 1) < 0.03, run.name
            checked += 1
    assert checked == len(SIZES)


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
