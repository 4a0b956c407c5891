"""Compare models over downstream tasks: one table of the scores in several output folders, with the published ones.

A folder is the --output of ctxlm_ds.finetune or ctxlm prompt. A row is a model, a column a task: median and spread over
seeds of the task's first metric on the development file, of n examples.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ctxlm_ds.apps.downstream.results import RESULT_NAME, epoch_medians
from ctxlm_ds.apps.report.charts import page, svg, table
from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import counted, setup_logging
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.training.hooks.curves import Chart, Points
from ctxlm_ds.untrusted_json import read_json_object

MISSING = "–"
FORM_OF_RUN = "give the --output of a finished fine-tuning"


class Run(NamedTuple):
    """What one output folder says."""

    folder: Path
    model: str
    """Name of the row."""
    task: str
    metric: str
    median: float
    cell: str
    """Median, spread, and numbers of seeds and of development examples."""
    published: Mapping[str, float]
    num_examples: float
    """Training examples that were used; infinite for all."""
    epochs: Points
    """Epoch and median of the metric after it."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="[NAME=]DIR", help="output folders; NAME is the model's in tables")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write scores.md and scores.html here")
    arguments = parser.parse_args(argv)
    setup_logging()
    runs = [read_run(given) for given in arguments.runs]
    shown = largest_of_each(runs)
    head, *rows = score_table(shown)
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    print("\n".join(lines))
    if arguments.output is not None:
        sections = {"Scores": [table(head, rows)]}
        if charts := curve_charts(runs, shown):
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
    if not (folder / RESULT_NAME).is_file():
        raise ConfigError(f"{folder}: no metrics.json; {FORM_OF_RUN}")
    summary = read_json_object(folder / RESULT_NAME, DataError)
    points = [read_json_object(path, DataError) for path in sorted(folder.glob(f"points/*/{RESULT_NAME}"))]
    try:
        chosen, metric = summary["chosen"], summary["metric"]
        median, lowest, highest = (float(chosen["dev"][metric][key]) for key in ("median", "lowest", "highest"))
        seeds, count = len(chosen["seeds"]), chosen.get("examples", {}).get("dev")
        facts = [counted(seeds, "seed")] + ([f"n {int(count):,}"] if count is not None else [])
        spread = "; ".join([*([f"{lowest:.3f} to {highest:.3f}"] if seeds > 1 else []), *facts])
        return Run(
            folder, name or _name_of(summary), str(summary["task"]), metric, median, f"{median:.3f} ({spread})",
            summary.get("published", {}), summary.get("max_train_examples") or math.inf,
            epoch_medians(points, chosen, metric),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / RESULT_NAME}: {error!s} is missing or of another type; {FORM_OF_RUN}") from None


def _name_of(summary: Mapping[str, Any]) -> str:
    path = Path(summary["model"])
    name = path.parent.name if path.name == "hf" and path.parent.name else path.name
    return ", ".join(filter(None, [name, "random weights" if summary.get("random") else "", summary.get("method", "")]))


def largest_of_each(runs: Iterable[Run]) -> list[Run]:
    """Return, of several runs of a model on a task, the one with most training examples.

    Raises:
        ConfigError: two runs have the same model, task and number of examples, or two metrics judge a task.
    """
    found: dict[tuple[str, str], Run] = {}
    metrics: dict[str, str] = {}
    places: dict[tuple[str, str, float], Path] = {}
    for run in runs:
        if metrics.setdefault(run.task, run.metric) != run.metric:
            raise ConfigError(f"{run.folder}: {run.task} is judged by {run.metric}, in another folder by "
                              f"{metrics[run.task]}; compare folders of one description")  # fmt: skip
        other = places.setdefault((run.model, run.task, run.num_examples), run.folder)
        if other != run.folder:
            both = f"{other} and {run.folder} are both {run.model} on {run.task}"
            raise ConfigError(f"{both}; name one: NAME={run.folder}")
        largest = found.setdefault((run.model, run.task), run)
        if run.num_examples > largest.num_examples:
            found[run.model, run.task] = run
    return list(found.values())


def score_table(runs: Sequence[Run]) -> list[list[str]]:
    """Return the table with its head: models, then published models; what was not run is a dash."""
    tasks = {run.task: run for run in runs}
    cells = {(run.model, run.task): run.cell for run in runs}
    for run in runs:
        cells |= {(f"{name} (published)", run.task): f"{score:.3f}" for name, score in run.published.items()}
    head = ["model", *(f"{task}, {run.metric}" for task, run in tasks.items())]
    names = dict.fromkeys(name for name, _ in cells)
    return [head, *([name, *(cells.get((name, task), MISSING) for task in tasks)] for name in names)]


def curve_charts(runs: Sequence[Run], shown: Sequence[Run]) -> list[Chart]:
    """Return charts of each task: the score of every model after each epoch, and by number of training examples."""
    curves: dict[str, dict[str, Points]] = {}
    for run in shown:
        curves.setdefault(f"{run.task}: {run.metric} after each epoch", {})[run.model] = run.epochs
    for run in runs:
        if run.num_examples < math.inf:
            of_models = curves.setdefault(f"{run.task}: {run.metric} by training examples", {})
            of_models.setdefault(run.model, []).append((run.num_examples, run.median))
    found = {title: {name: sorted(points) for name, points in models.items() if len(points) > 1}
             for title, models in curves.items()}  # fmt: skip
    return [Chart(title, of_models) for title, of_models in found.items() if of_models]
