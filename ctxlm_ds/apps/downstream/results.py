"""Points of a grid of hyperparameters, their results on disk, and report.html: scores, curves, confusion."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.apps.report.charts import page, svg, table
from ctxlm_ds.atomic import is_same, read_object, write_text
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.training.hooks.curves import Chart, Points

PUBLISHED = {"batch_sizes": [16, 32], "learning_rates": [2e-5, 3e-5, 5e-5], "epochs": [2.0, 3.0, 4.0]}
"""BERT's grid (Devlin et al. 2018, appendix A.3)."""
RESULT_NAME = "metrics.json"
"""File of a point that is complete."""
OF_A_POINT = {"batch_size": "batch", "learning_rate": "rate", "epochs": "epochs"}
"""Settings that differ between points, apart from the seed, with their headings in tables."""
MAX_SHOWN = 20
"""Wrong predictions in the report."""


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
    results: Sequence[dict[str, Any]], metric: str, settings: Iterable[str] = tuple(OF_A_POINT)
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


def _row(group: list[dict[str, Any]], settings: Iterable[str]) -> dict[str, Any]:
    point = group[0]["point"]
    row: dict[str, Any] = {name: point[name] for name in settings}
    row["seeds"] = sorted(one["point"]["seed"] for one in group)
    for part in ("dev", "test"):
        if all(part in one for one in group):
            row[part] = {name: _spread([one[part][name] for one in group]) for name in group[0][part]}
    return row


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def write_report(
    output: Path, task: TaskDescription, summary: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> None:
    """Write report.html, with a confusion matrix if there are labels.

    Args:
        output: the folder that holds points/.
        task: the description.
        summary: see `summarize`, with task, model and published scores.
        results: metrics.json of each point.
    """
    head, *rows = result_rows(summary)
    sections = {"Results": [table(head, rows)], "Published": [_published(summary)]}
    metric = summary["metric"]
    curves = {_label(row): epoch_medians(results, row, metric) for row in summary["grid"]}
    sections["Learning curves"] = [svg(Chart(f"{metric} on the development file after each epoch", curves, {}))]
    predicted = _read_predictions(output, summary["chosen"])
    if task.entry.answer == "label":
        sections["Confusion"] = [_confusion([(one["label"], one["prediction"]) for one in predicted])]
    sections["Wrong predictions of the chosen run"] = [_wrong(predicted)]
    write_text(output / "report.html", page(f"{task.title or summary['task']}: {summary['model']}", sections))


def epoch_medians(results: Iterable[Mapping[str, Any]], point: Mapping[str, Any], metric: str) -> Points:
    """Return the medians over seeds of a metric after each epoch of a point; none if its log has no epochs."""
    values: dict[float, list[float]] = {}
    for result in results:
        if all(result.get("point", {}).get(name) == point.get(name) for name in OF_A_POINT):
            for line in result.get("log", []):
                if math.isfinite(line.get(f"eval_{metric}", math.nan)):
                    values.setdefault(line["epoch"], []).append(line[f"eval_{metric}"])
    return [(epoch, statistics.median(several)) for epoch, several in sorted(values.items())]


def result_rows(summary: Mapping[str, Any], settings: Mapping[str, str] = OF_A_POINT) -> list[list[str]]:
    """Return the grid as a table with its head: median and spread of each metric, the chosen point marked."""
    parts = [part for part in ("dev", "test") if part in summary["chosen"]]
    names = [name if part == "dev" else f"{part} {name}" for part in parts for name in summary["chosen"][part]]
    rows = [["", *settings.values(), "seeds", *names]]
    for row in summary["grid"]:
        figures = [one for part in parts for one in row[part].values()]
        cells = [f"{one['median']:.4f} ({one['lowest']:.4f} to {one['highest']:.4f})" for one in figures]
        mark = "chosen" if row == summary["chosen"] else ""
        rows.append([mark, *(f"{row[name]:g}" for name in settings), str(len(row["seeds"])), *cells])
    return rows


def _label(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{heading} {row[name]:g}" for name, heading in OF_A_POINT.items())


def _published(summary: Mapping[str, Any]) -> str:
    if not summary["published"]:
        return "<p>The description names no published score.</p>"
    rows = [[name, f"{score:.3f}"] for name, score in summary["published"].items()]
    ours = summary["chosen"]["dev"][summary["metric"]]["median"]
    return table(["model", summary["metric"]], [*rows, [str(summary["model"]), f"{ours:.3f}"]])


def _read_predictions(output: Path, chosen: Mapping[str, Any]) -> list[dict[str, Any]]:
    point = Point(chosen["batch_size"], chosen["learning_rate"], chosen["epochs"], chosen["seeds"][0])
    text = (output / "points" / point.name / "dev_predictions.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _wrong(predicted: Sequence[Mapping[str, Any]]) -> str:
    wrong = [one for one in predicted if not one["right"]][:MAX_SHOWN]
    rows = [(one["example"][:300], one["label"][:200], _shown(one["prediction"])[:200]) for one in wrong]
    return table(["example", "right", "predicted"], rows)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _confusion(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a table with a row for each right label and a column for each prediction."""
    counts = Counter(pairs)
    labels = sorted({label for pair in pairs for label in pair})
    rows = [[right, *(str(counts[right, other] or "") for other in labels)] for right in labels]
    return table(["right \\ predicted", *labels], rows)
