"""Grids: points, results that are kept, the median over seeds, and the chosen point."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.downstream.fit import Point
from ctxlm_ds.apps.downstream.results import PUBLISHED, grid_points, is_done, read_results, summarize
from ctxlm_ds.errors import ConfigError


def result(rate: float, seed: int, accuracy: float) -> dict[str, Any]:
    return {"point": asdict(Point(8, rate, 3, seed)), "dev": {"accuracy": accuracy, "mse": accuracy}, "log": []}


def test_the_published_grid_has_18_points_a_seed() -> None:
    points = grid_points(PUBLISHED["batch_sizes"], PUBLISHED["learning_rates"], PUBLISHED["epochs"], [1, 2])
    assert len(set(points)) == 36 and points[0].name == "batch16-lr2e-05-epochs2-seed1"


def test_the_best_median_is_chosen_not_the_best_run() -> None:
    results = [result(1e-3, seed, value) for seed, value in enumerate([0.5, 0.6, 0.99])]
    results += [result(2e-3, seed, value) for seed, value in enumerate([0.7, 0.7, 0.8])]
    summary = summarize(results, "accuracy")
    assert summary["chosen"]["learning_rate"] == 2e-3
    assert summary["grid"][0]["dev"]["accuracy"] == {"median": 0.6, "lowest": 0.5, "highest": 0.99}
    results += [result(3e-3, 1, float("nan"))]
    assert summarize(results, "accuracy")["chosen"]["learning_rate"] == 2e-3
    assert summarize(results, "mse")["chosen"]["learning_rate"] == 1e-3


def test_finished_points_are_kept_and_others_of_other_settings_refused(tmp_path: Path) -> None:
    folder = tmp_path / "points" / "batch8-lr0.001-epochs3-seed1"
    assert not is_done(folder, {"x": 1})
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({"x": 1}))
    assert not is_done(folder, {"x": 1})
    (folder / "metrics.json").write_text(json.dumps(result(1e-3, 1, 0.5)))
    assert is_done(folder, {"x": 1})
    assert read_results(tmp_path, {"x": 1}) == [result(1e-3, 1, 0.5)]
    (tmp_path / "points" / f"{folder.name}.partial-1").mkdir()
    (tmp_path / "points" / f"{folder.name}.partial-1" / "metrics.json").write_text("{}")
    assert len(read_results(tmp_path, {"x": 1})) == 1
    with pytest.raises(ConfigError, match=r"x 1 -> 2; choose another --output"):
        is_done(folder, {"x": 2})
