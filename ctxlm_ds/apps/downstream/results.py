"""Points of a grid and settings of all, their results on disk, and report.html: scores, curves, confusion."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.apps.downstream.examples import Example, grouped
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.apps.report.charts import page, svg, table
from ctxlm_ds.atomic import is_same, read_object, write_text
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.training.hooks.curves import Chart, Points

if TYPE_CHECKING:
    from ctxlm_ds.apps.downstream.kinds.base import Kind, Prediction

PUBLISHED = {"batch_sizes": [16, 32], "learning_rates": [2e-5, 3e-5, 5e-5], "epochs": [2.0, 3.0, 4.0]}
"""BERT's grid (Devlin et al. 2018, appendix A.3)."""
RESULT_NAME = "metrics.json"
"""File of a point that is complete."""
PREDICTIONS = "{}_predictions.jsonl"
PARTS = ("dev", "test")
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
        return f"batch{self.batch_size}-lr{self.learning_rate:g}-epochs{self.epochs:g}-seed{self.seed}"


@dataclass(frozen=True)
class Tuning:
    """Which parameters are trained, and how fast."""

    layers: int | None = None
    """Last blocks that are trained with the head (0: only the head); None trains everything."""
    gradual: bool = False
    """Unfreeze one more block each epoch, from the last (Howard and Ruder 2018)."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each block to the one below it."""
    lora_rank: int = 0
    """Rank of LoRA's matrices (Hu et al. 2021) in all linear layers of the blocks; 0 uses none."""

    def __post_init__(self) -> None:
        if len(self.frozen_by) > 1:
            raise ConfigError("--train-layers, --gradual and --lora exclude each other; give one")
        if self.lora_rank and self.layer_decay < 1:
            raise ConfigError("--lora and --layer-decay exclude each other: LoRA trains few weights, all at one rate")
        if not 0.0 < self.layer_decay <= 1.0:
            raise ConfigError(f"--layer-decay {self.layer_decay}: a factor above 0 and up to 1 (1: one rate)")

    @property
    def frozen_by(self) -> list[str]:
        """Return the given options that keep the embeddings as they are, one at most."""
        given = {"--train-layers": self.layers is not None, "--gradual": self.gradual, "--lora": self.lora_rank > 0}
        return [name for name, is_given in given.items() if is_given]


@dataclass(frozen=True)
class FitSettings:
    """Settings that all points share."""

    tuning: Tuning = Tuning()
    random: bool = False
    weight_decay: float = 0.01
    warmup_share: float = 0.1
    early_stopping: int = 0
    """Evaluations without a better score after which training stops, with the best epoch; 0 trains to the end."""
    deepspeed: str | None = None
    bf16: bool = False
    save_model: bool = False


def grid_points(
    batch_sizes: Iterable[int], rates: Iterable[float], epochs: Iterable[float], seeds: Iterable[int]
) -> list[Point]:
    """Return all points, those of one seed after another."""
    every = product(seeds, batch_sizes, rates, epochs)
    return list(dict.fromkeys(Point(size, rate, long, seed) for seed, size, rate, long in every))


def is_done(folder: Path, wanted: dict[str, Any]) -> bool:
    """Return whether a point has a result, which must be of the same settings (ConfigError)."""
    if not (folder / RESULT_NAME).is_file():
        return False
    recorded = read_object(folder / "settings.json")
    recorded = recorded and {"export": wanted.get("export"), **recorded}  # earlier versions did not record it
    return is_same(folder, recorded, wanted, "choose another --output or remove it", ConfigError)


def prediction_rows(kind: Kind, predictions: Sequence[Prediction], examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Return the lines of a file of predictions: inputs, label, prediction, probabilities."""
    rows = []
    for prediction, example in zip(predictions, examples, strict=True):
        label = example.shown_label()
        right = kind.is_right(prediction, example) if label or kind.task.unanswerable else None
        row: dict[str, Any] = {"id": example.identifier, "example": example.shown_text(), "label": label}
        row |= {"prediction": prediction.value, "right": right, "probabilities": prediction.probabilities}
        rows.append(row)
    return rows


def write_point(
    folder: Path, settings: Mapping[str, Any], result: Mapping[str, Any], parts: Mapping[str, Sequence[Any]]
) -> None:
    """Write settings, metrics.json and a file of predictions of each part, a line of JSON each."""
    for part, rows in parts.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text(folder / PREDICTIONS.format(part), "".join(lines))
    write_text(folder / "settings.json", json.dumps(settings, indent=1) + "\n")
    counts = {part: len(rows) for part, rows in parts.items()}
    write_text(folder / RESULT_NAME, json.dumps({**result, "examples": counts}, indent=1) + "\n")


def read_results(output: Path, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return metrics.json of each finished point, all of the same settings (ConfigError)."""
    folders = [path for path in sorted(output.glob("points/*-seed*")) if path.name.rpartition("-seed")[2].isdigit()]
    return [read_object(path / RESULT_NAME) or {} for path in folders if is_done(path, wanted)]


def summarize(
    results: Sequence[dict[str, Any]], metric: str, settings: Iterable[str] = tuple(OF_A_POINT)
) -> dict[str, Any]:
    """Return median, mean and spread over seeds per point (`settings`), and the point with the best median on dev."""
    groups = grouped((tuple(result["point"][name] for name in settings), result) for result in results)
    rows = []
    for values, group in sorted(groups.items()):
        row = dict(zip(settings, values, strict=True)) | {"seeds": sorted(one["point"]["seed"] for one in group)}
        row["examples"] = group[0].get("examples", {})
        parts = [part for part in PARTS if all(part in one for one in group)]
        rows.append(row | {part: _spreads([one[part] for one in group]) for part in parts})
    sign = -1 if metric == "mse" else 1
    medians = [sign * row["dev"][metric]["median"] for row in rows]
    chosen = max(range(len(rows)), key=lambda at: -math.inf if math.isnan(medians[at]) else medians[at])
    return {"metric": metric, "grid": rows, "chosen": rows[chosen], "most_frequent": results[0].get("most_frequent")}


def _spreads(scores: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    values = {name: [one[name] for one in scores] for name in scores[0]}
    return {name: {"median": statistics.median(of_seeds), "mean": statistics.fmean(of_seeds), "lowest": min(of_seeds),
                   "highest": max(of_seeds)} for name, of_seeds in values.items()}  # fmt: skip


def write_report(
    output: Path, task: TaskDescription, summary: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> None:
    """Write report.html of a summary (`summarize`, with task, model and published scores) and its points' results."""
    head, *rows = result_rows(summary)
    metric, chosen = summary["metric"], summary["chosen"]
    point = Point(chosen["batch_size"], chosen["learning_rate"], chosen["epochs"], chosen["seeds"][0])
    text = (output / "points" / point.name / PREDICTIONS.format("dev")).read_text(encoding="utf-8")
    predicted = [json.loads(line) for line in text.split("\n")[:-1]]
    curves = {}
    for row in summary["grid"]:
        label = ", ".join(f"{heading} {row[name]:g}" for name, heading in OF_A_POINT.items())
        curves[label] = epoch_medians(results, row, metric)
    sections = {
        "Results": [table(head, rows)],
        "Published": ["<p>The description names no published score.</p>"],
        "Learning curves": [svg(Chart(f"{metric} on the development file after each epoch", curves))],
    }
    if summary["published"]:
        known = [[name, f"{score:.3f}"] for name, score in summary["published"].items()]
        ours = [str(summary["model"]), f"{chosen['dev'][metric]['median']:.3f}"]
        sections["Published"] = [table(["model", metric], [*known, ours])]
    if task.entry.answer == "label":
        counts = Counter((one["label"], one["prediction"]) for one in predicted)
        labels = sorted({label for pair in counts for label in pair})
        cells = [[right, *(str(counts[right, other] or "") for other in labels)] for right in labels]
        sections["Confusion"] = [table(["right \\ predicted", *labels], cells)]
    wrong = []
    for one in [one for one in predicted if not one["right"]][:MAX_SHOWN]:
        value = one["prediction"]
        shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        wrong.append((one["example"][:300], one["label"][:200], shown[:200]))
    sections["Wrong predictions of the chosen run"] = [table(["example", "right", "predicted"], wrong)]
    write_text(output / "report.html", page(f"{task.title or summary['task']}: {summary['model']}", sections))


def epoch_medians(results: Iterable[Mapping[str, Any]], point: Mapping[str, Any], metric: str) -> Points:
    """Return the medians over seeds of a metric after each epoch of a point; none if its log has no epochs."""
    of_point = [one for one in results if all(one.get("point", {}).get(name) == point.get(name) for name in OF_A_POINT)]
    key, lines = f"eval_{metric}", (line for result in of_point for line in result.get("log", []))
    figures = ((line["epoch"], line[key]) for line in lines if math.isfinite(line.get(key, math.nan)))
    return [(epoch, statistics.median(several)) for epoch, several in sorted(grouped(figures).items())]


def result_rows(summary: Mapping[str, Any], settings: Mapping[str, str] = OF_A_POINT) -> list[list[str]]:
    """Return the grid as a table: numbers of seeds and examples, median and spread of each metric; the chosen point."""
    parts = [part for part in PARTS if part in summary["chosen"]]
    names = [name if part == "dev" else f"{part} {name}" for part in parts for name in summary["chosen"][part]]
    rows = [["", *settings.values(), "seeds", *(f"n {part}" for part in parts), *names]]
    for row in summary["grid"]:
        figures = [one for part in parts for one in row[part].values()]
        cells = [f"{one['median']:.4f} ({one['lowest']:.4f} to {one['highest']:.4f})" for one in figures]
        mark = "chosen" if row == summary["chosen"] else ""
        numbers = [str(len(row["seeds"])), *(str(row["examples"].get(part, "")) for part in parts)]
        rows.append([mark, *(f"{row[name]:g}" for name in settings), *numbers, *cells])
    if frequent := summary.get("most_frequent"):
        cells = [f"{frequent[name]:.4f}" if name in frequent else "" for name in rows[0][1:]]
        rows.append(["most frequent label", *cells])
    return rows
