"""A grid of hyperparameters over several seeds: its points, the results on disk, and what they say together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import is_same, read_object
from ctxlm_ds.errors import ConfigError

PUBLISHED = {"batch_sizes": [16, 32], "learning_rates": [2e-5, 3e-5, 5e-5], "epochs": [2.0, 3.0, 4.0]}
"""BERT's grid (Devlin et al. 2018, appendix A.3)."""
RESULT_NAME = "metrics.json"
"""File of a point that is complete."""


@dataclass(frozen=True)
class Point:
    """One point of the grid of hyperparameters, with a seed."""

    batch_size: int
    learning_rate: float
    epochs: float
    seed: int

    @property
    def name(self) -> str:
        """Return a name for folders."""
        return f"batch{self.batch_size}-lr{self.learning_rate:g}-epochs{self.epochs:g}-seed{self.seed}"


def grid_points(
    batch_sizes: Iterable[int], rates: Iterable[float], epochs: Iterable[float], seeds: Iterable[int]
) -> list[Point]:
    """Return all points, those of one seed after another."""
    every = product(seeds, batch_sizes, rates, epochs)
    return list(dict.fromkeys(Point(size, rate, long, seed) for seed, size, rate, long in every))


def is_done(folder: Path, wanted: dict[str, Any]) -> bool:
    """Return whether a point has a result of the same settings.

    Raises:
        ConfigError: it has one of other settings.
    """
    if not (folder / RESULT_NAME).is_file():
        return False
    recorded = read_object(folder / "settings.json")
    return is_same(folder, recorded, wanted, "choose another --output or remove it", ConfigError)


def read_results(output: Path, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what metrics.json of each finished point holds.

    Raises:
        ConfigError: a point has other settings.
    """
    results = []
    for path in sorted(output.glob("points/*-seed*")):
        if path.name.rpartition("-seed")[2].isdigit() and is_done(path, wanted):
            results.append(read_object(path / RESULT_NAME) or {})
    return results


def summarize(
    results: Sequence[dict[str, Any]], metric: str, settings: Sequence[str] = ("batch_size", "learning_rate", "epochs")
) -> dict[str, Any]:
    """Return, per point of the grid, the median and spread over seeds, and the point with the best median on dev.

    Args:
        results: metrics.json of each point.
        metric: what the best one is judged by.
        settings: what differs between points, apart from the seed.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(tuple(result["point"][name] for name in settings), []).append(result)
    rows = [_row(group, settings) for _, group in sorted(groups.items())]
    sign = -1 if metric == "mse" else 1
    medians = [sign * row["dev"][metric]["median"] for row in rows]
    chosen = max(range(len(rows)), key=lambda at: -math.inf if math.isnan(medians[at]) else medians[at])
    return {"metric": metric, "grid": rows, "chosen": rows[chosen]}


def _row(group: list[dict[str, Any]], settings: Sequence[str]) -> dict[str, Any]:
    point = group[0]["point"]
    row: dict[str, Any] = {name: point[name] for name in settings}
    row["seeds"] = sorted(one["point"]["seed"] for one in group)
    for part in ("dev", "test"):
        if all(part in one for one in group):
            row[part] = {name: _spread([one[part][name] for one in group]) for name in group[0][part]}
    return row


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
