"""The law of a ladder: made losses give back the constants that made them; text to law in a ladder of tiny runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.apps.plan.budget import read_ladder
from ctxlm_ds.errors import ConfigError
from tools.scaling import LAW, Point, describe, fit_law, ladder_runs, predicted, read_points

TRUE = (1.8, 150.0, 0.34, 300.0, 0.31)
SIZES, TOKENS, UNIQUE = (2e5, 5e5, 1e6, 3e6), (1e6, 3e6, 1e7), 4e6


def made(noise: float) -> list[Point]:
    rng, points = np.random.default_rng(1), []
    for size in SIZES:
        for tokens in TOKENS:
            point = Point(size, tokens, UNIQUE, 0.0, 6e-12 * size * tokens)
            points.append(point._replace(loss=predicted(TRUE, point) * np.exp(noise * rng.normal())))
    return points


def test_the_constants_of_made_losses_are_found() -> None:
    found = fit_law(made(0.0))
    assert found[[0, 2, 4]] == pytest.approx([1.8, 0.34, 0.31], rel=0.05)
    # Tokens beyond a text of 4 million count less.
    again = Point(2e5, 1e7, UNIQUE, 0.0, 0.0)
    assert predicted(TRUE, again) > predicted(TRUE, again._replace(unique=1e7))


def test_the_largest_run_is_foretold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.scaling.RESAMPLES", 15)
    lines = describe(made(0.002), tmp_path)
    text = "\n".join(lines)
    assert "held back: 3,000,000 parameters, 10,000,000 tokens" in text and ", inside" in text and len(lines) == 21
    points = made(0.0)
    points[-1] = points[-1]._replace(loss=points[-1].loss + 1.0)
    assert ", outside" in "\n".join(describe(points, tmp_path))
    law = read_ladder(tmp_path / LAW)
    assert law.largest == 3e6 and law.source == str(tmp_path / LAW)
    assert set(json.loads((tmp_path / LAW).read_text())["law"]) == {"e", "a", "alpha", "b", "beta", "largest"}


def test_too_few_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="0 runs are past their plateau; the law has five constants"):
        read_points(tmp_path)
    for widths, tokens in (([64], 1000), ([64, 128], 0), ([64, 128], "many")):
        with pytest.raises(ConfigError, match="--widths, --tokens, --rate: .*give at least two widths"):
            ladder_runs(tmp_path, "modernbert-docstrings", widths, tokens, 0.5)  # type: ignore[arg-type]
    runs = ladder_runs(tmp_path, "modernbert-docstrings", [64, 128], 1000, 0.5)
    assert [job.name for job in runs.compared()] == ["w64/rate-0.5/seed-1", "w128/rate-0.5/seed-1"] and not runs.search
