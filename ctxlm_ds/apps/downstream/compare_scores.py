"""Compare models over downstream tasks: one table of the scores in several output folders, with the published ones.

A folder is the --output of ctxlm_ds.finetune or ctxlm prompt. A row is a model, a
column a task: median and spread over seeds of the task's first metric on the development file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.downstream.results import epoch_medians
from ctxlm_ds.apps.report.charts import page, svg, table
from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import setup_logging
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.training.hooks.curves import Chart, Points
from ctxlm_ds.untrusted_json import read_json_object

MISSING = "–"
FORM_OF_RUN = "give the --output of a finished fine-tuning"


@dataclass(frozen=True)
class Run:
    """What one output folder says."""

    folder: Path
    model: str
    """Name of the row."""
    task: str
    metric: str
    scores: Mapping[str, float]
    """Median, lowest and highest over seeds."""
    num_seeds: int
    published: Mapping[str, float]
    num_examples: int | None
    """Training examples that were used; None for all."""
    epochs: Points
    """Epoch and median of the metric after it."""

    @property
    def cell(self) -> str:
        """Return median and spread."""
        median = f"{self.scores['median']:.3f}"
        if self.num_seeds == 1:
            return median
        return f"{median} ({self.scores['lowest']:.3f} to {self.scores['highest']:.3f})"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="[NAME=]DIR", help="output folders; NAME is the model's in tables")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write scores.md and scores.html here")
    arguments = parser.parse_args(argv)
    setup_logging()
    runs = [read_run(given) for given in arguments.runs]
    shown = largest_of_each(runs)
    head, *rows = score_table(shown)
    lines = markdown([head, *rows])
    print("\n".join(lines))
    if arguments.output is not None:
        sections = {"Scores": [table(head, rows)]}
        charts = [*epoch_charts(shown), *example_charts(runs)]
        if charts:
            sections["Learning curves"] = [f"<h3>{escape(chart.title)}</h3>\n{svg(chart)}" for chart in charts]
        write_text(arguments.output / "scores.md", "\n".join(lines) + "\n")
        write_text(arguments.output / "scores.html", page("Scores of models on tasks", sections))


def read_run(given: str) -> Run:
    """Read an output folder, which may be written as NAME=DIR.

    Raises:
        ConfigError: it has no results.
        DataError: its metrics.json is not in the form of these commands.
    """
    name, _, path = given.rpartition("=")
    folder = Path(path)
    if not (folder / "metrics.json").is_file():
        raise ConfigError(f"{folder}: no metrics.json; {FORM_OF_RUN}")
    summary = read_json_object(folder / "metrics.json", DataError)
    points = [read_json_object(path, DataError) for path in sorted(folder.glob("points/*/metrics.json"))]
    try:
        chosen, metric = summary["chosen"], summary["metric"]
        return Run(
            folder, name or _name_of(summary), str(summary["task"]), metric,
            {key: float(chosen["dev"][metric][key]) for key in ("median", "lowest", "highest")},
            len(chosen["seeds"]), summary.get("published", {}), summary.get("max_train_examples"),
            epoch_medians(points, chosen, metric),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / 'metrics.json'}: {error!s} is missing or of another type; {FORM_OF_RUN}") from None


def _name_of(summary: Mapping[str, Any]) -> str:
    path = Path(summary["model"])
    name = path.parent.name if path.name == "hf" and path.parent.name else path.name
    kinds = ["random weights"] if summary.get("random") else []
    return ", ".join([name, *kinds, *([summary["method"]] if summary.get("method") else [])])


def largest_of_each(runs: Iterable[Run]) -> list[Run]:
    """Return, of several runs of a model on a task, the one with most training examples.

    Raises:
        ConfigError: two runs have the same model, task and number of examples, or two metrics judge a task.
    """
    found: dict[tuple[str, str], Run] = {}
    metrics: dict[str, str] = {}
    places: dict[tuple[str, str, int | None], Path] = {}
    for run in runs:
        if metrics.setdefault(run.task, run.metric) != run.metric:
            raise ConfigError(f"{run.folder}: {run.task} is judged by {run.metric}, in another folder by "
                              f"{metrics[run.task]}; compare folders of one description")  # fmt: skip
        other = places.setdefault((run.model, run.task, run.num_examples), run.folder)
        if other != run.folder:
            both = f"{other} and {run.folder} are both {run.model} on {run.task}"
            raise ConfigError(f"{both}; name one: NAME={run.folder}")
        key = run.model, run.task
        if key not in found or _size(run) > _size(found[key]):
            found[key] = run
    return list(found.values())


def _size(run: Run) -> float:
    return float("inf") if run.num_examples is None else run.num_examples


def score_table(runs: Sequence[Run]) -> list[list[str]]:
    """Return the table with its head: models, then published models; what was not run is a dash."""
    tasks = {run.task: run for run in runs}
    cells = {(run.model, run.task): run.cell for run in runs}
    for run in runs:
        cells |= {(f"{name} (published)", run.task): f"{score:.3f}" for name, score in run.published.items()}
    names = dict.fromkeys([run.model for run in runs] + [name for name, _ in cells])
    head = ["model", *(f"{task}, {run.metric}" for task, run in tasks.items())]
    return [head, *([name, *(cells.get((name, task), MISSING) for task in tasks)] for name in names)]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def epoch_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart for each task: the score after each epoch of every model with several epochs."""
    curves: dict[str, dict[str, Points]] = {}
    for run in runs:
        if len(run.epochs) > 1:
            curves.setdefault(f"{run.task}: {run.metric} after each epoch", {})[run.model] = run.epochs
    return [Chart(title, of_models, {}) for title, of_models in curves.items()]


def example_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart for each task that a model was trained on with several numbers of examples."""
    curves: dict[str, dict[str, Points]] = {}
    for run in runs:
        if run.num_examples is not None:
            title = f"{run.task}: {run.metric} by training examples"
            curves.setdefault(title, {}).setdefault(run.model, []).append((run.num_examples, run.scores["median"]))
    found = {title: {name: sorted(points) for name, points in models.items() if len(points) > 1}
             for title, models in curves.items()}  # fmt: skip
    return [Chart(title, of_models, {}) for title, of_models in found.items() if of_models]
