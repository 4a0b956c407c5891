"""Compare models over tasks: one table of the scores in several output folders, with the published ones.

A folder is the --output of ctxlm finetune, ctxlm prompt or ctxlm evaluate. A row is a model on a task: mean and spread
over seeds of the task's metric on the development file or on the pairs, of n examples.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ctxlm_ds.apps.downstream.results import RESULT_NAME, epoch_medians
from ctxlm_ds.apps.report.charts import page, svg, table
from ctxlm_ds.atomic import write_text
from ctxlm_ds.checkpoint.folders import step_name
from ctxlm_ds.console import aligned, setup_logging
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.training.hooks.curves import Chart, Points
from ctxlm_ds.untrusted_json import read_json_object

FORM_OF_RUN = "give the --output of a finished fine-tuning or evaluation; its command, run again, completes it"
TABLE = "table.{}"
WORDS = ("task", "model", "definition", "metric", "source")
"""Columns of words, in tables of figures."""
Record = dict[str, Any]
"""A row of the table: a model, or a published one, on a task."""


class Run(NamedTuple):
    """What one output folder says about a model on a task."""

    folder: Path
    record: Record
    published: Mapping[str, float]
    source: str
    """Publication of these."""
    num_examples: float
    """Training examples that were used; infinite for all."""
    epochs: Points
    """Epoch and median of the metric after it."""
    step: int | None
    groups: Mapping[str, Mapping[str, Mapping[str, float]]]
    """Values of the phenomena and of the paradigms of minimal pairs, by name."""

    @property
    def place(self) -> tuple[str, str]:
        return self.record["model"], self.record["task"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="[NAME=]DIR", help="output folders; NAME is the model's in tables")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write table.md, .csv, .json and report.html here")
    arguments = parser.parse_args(argv)
    setup_logging()
    show([run for given in arguments.runs for run in read_runs(given)], arguments.output)


def show(runs: Sequence[Run], output: Path | None, title: str = "Scores of models on tasks") -> None:
    """Print the table of some runs; write it as Markdown, CSV, JSON and a page if there is an `output`."""
    shown = largest_of_each(runs)
    records = table_records(shown)
    head, *rows = shown_table(records)
    print("\n".join(aligned([head, *rows], left=[at for at, name in enumerate(head) if name in WORDS])))
    if output is None:
        return
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, *rows)]
    write_text(output / TABLE.format("md"), "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, records[0], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_text(output / TABLE.format("csv"), text.getvalue())
    groups = {run.place: run.groups for run in shown}
    found = [record | {"groups": groups.get((record["model"], record["task"]), {})} for record in records]
    write_text(output / TABLE.format("json"), json.dumps(found, indent=1) + "\n")
    sections = {"Scores": [table(head, rows)]}
    if charts := curve_charts(runs, shown):
        sections["Curves"] = [f"<h3>{escape(chart.title)}</h3>\n{svg(chart)}" for chart in charts]
    write_text(output / "report.html", page(title, sections | group_tables(shown)))


def read_runs(given: str) -> list[Run]:
    """Read an output folder, which may be written as NAME=DIR, or all of an evaluation.

    Raises ConfigError if it has no results, DataError if a metrics.json is not in the form of these commands.
    """
    name, _, path = ("", "", given) if Path(given).is_dir() else given.rpartition("=")
    folder = Path(path)
    inside = [folder / RESULT_NAME] if (folder / RESULT_NAME).is_file() else sorted(folder.glob(f"*/*/{RESULT_NAME}"))
    if not inside:
        raise ConfigError(f"{folder}: no metrics.json; {FORM_OF_RUN}")
    return [read_run(one.parent, name) for one in inside]


def read_run(folder: Path, name: str = "") -> Run:
    """Read the results of a model on a task; `name` replaces the model's. Raises DataError for damaged ones."""
    summary = read_json_object(folder / RESULT_NAME, DataError)
    points = [read_json_object(path, DataError) for path in sorted(folder.glob(f"points/*/{RESULT_NAME}"))]
    try:
        chosen, metric = summary["chosen"], summary["metric"]
        scores, count = chosen["dev"], chosen.get("examples", {}).get("dev")
        low, high = summary.get("interval") or (None, None)
        record = {
            "task": str(summary["task"]), "model": name or name_of(summary), "definition": summary.get("definition"),
            "metric": metric, **{key: float(scores[metric][key]) for key in ("mean", "lowest", "highest")},
            "seeds": len(chosen["seeds"]), "interval_low": low, "interval_high": high, "examples": count,
            **{key: scores[key]["mean"] if key in scores else None for key in ("ties", "ties_right")}, "source": None,
        }  # fmt: skip
        return Run(
            folder, record, summary.get("published", {}), str(summary.get("source", "")),
            summary.get("max_train_examples") or math.inf, epoch_medians(points, chosen, metric), summary.get("step"),
            points[0].get("groups", {}) if points else {},
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / RESULT_NAME}: {error!s} is missing or of another type; {FORM_OF_RUN}") from None


def name_of(summary: Mapping[str, Any]) -> str:
    """Return the name of a result's model: that of its folder, or of the run whose export it is."""
    path = Path(summary["model"])
    name = path.parent.name if path.name == "hf" and path.parent.name else path.name
    return ", ".join(filter(None, [name, "random weights" if summary.get("random") else "", summary.get("method", "")]))


def largest_of_each(runs: Iterable[Run]) -> list[Run]:
    """Return, of several runs of a model on a task, the one with most training examples.

    Raises ConfigError if two runs have the same model, task and number of examples, or two metrics or definitions of a
    score judge a task.
    """
    found: dict[tuple[str, str, float], Run] = {}
    judged: dict[str, list[str]] = {}
    for run in runs:
        model, task = run.place
        ways = [str(run.record[key]) for key in ("metric", "definition") if run.record[key]]
        if judged.setdefault(task, ways) != ways:
            raise ConfigError(f"{run.folder}: {task} is judged by {', '.join(ways)}, in another folder by "
                              f"{', '.join(judged[task])}; compare folders of one description")  # fmt: skip
        other = found.setdefault((model, task, run.num_examples), run)
        if other.folder != run.folder:
            both = f"{other.folder} and {run.folder} are both {model} on {task}"
            raise ConfigError(f"{both}; name one: NAME={run.folder}")
    places = dict.fromkeys(run.place for run in found.values())
    return [max((run for run in found.values() if run.place == place), key=lambda run: run.num_examples)
            for place in places]  # fmt: skip


def table_records(runs: Sequence[Run]) -> list[Record]:
    """Return a record for each run and published model, those of a task together."""
    records: list[Record] = []
    for task in dict.fromkeys(run.record["task"] for run in runs):
        of_task = [run for run in runs if run.record["task"] == task]
        published: dict[str, Record] = {}
        for run in of_task:
            for name, score in run.published.items():
                record = {"task": task, "model": f"{name} (published)", "metric": run.record["metric"], "mean": score}
                published.setdefault(name, record | {"source": run.source})
        records += [*(run.record for run in of_task), *published.values()]
    return [dict.fromkeys(runs[0].record) | record for record in records]


def shown_table(records: Iterable[Record]) -> list[list[str]]:
    """Return the table for people with its head; a column that would be empty is left out."""
    rows = []
    for one in records:
        figures = {key: "" if value is None else f"{value:.3f}" for key, value in one.items() if type(value) is float}
        spread = f"{figures['lowest']} to {figures['highest']} ({one['seeds']})" if (one["seeds"] or 1) > 1 else ""
        rows.append({
            **{key: one[key] or "" for key in WORDS[:-1]}, "mean": figures["mean"],
            "spread (seeds)": spread,
            "95 %": f"{figures['interval_low']} to {figures['interval_high']}" if "interval_low" in figures else "",
            "n": f"{one['examples']:,}" if one["examples"] is not None else "", "ties": figures.get("ties", ""),
            "ties right": figures.get("ties_right", ""), "source": one["source"] or "",
        })  # fmt: skip
    head = [name for name in rows[0] if any(row[name] for row in rows)]
    return [head, *([row[name] for name in head] for row in rows)]


def group_tables(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the sections of the page with the values of each phenomenon and paradigm, a column a model."""
    sections = {}
    for task in dict.fromkeys(run.record["task"] for run in runs):
        of_task = [run for run in runs if run.record["task"] == task and run.groups]
        for kind in of_task[0].groups if of_task else ():
            names = [name for name in of_task[0].groups[kind] if all(name in run.groups[kind] for run in of_task)]
            rows = [[name, *(f"{run.groups[kind][name]['accuracy']:.3f}" for run in of_task)] for name in names]
            sections[f"{task}: {kind}"] = [table(["", *(run.record["model"] for run in of_task)], rows)]
    return sections


def curve_charts(runs: Sequence[Run], shown: Sequence[Run]) -> list[Chart]:
    """Return charts of each task: the score after each epoch, by step, and by number of training examples."""
    curves: dict[str, dict[str, Points]] = {}
    for run in shown:
        curves.setdefault(f"{_title(run)} after each epoch", {})[run.record["model"]] = run.epochs
        if run.step is not None:
            of_runs = curves.setdefault(f"{_title(run)} by step", {})
            name = run.record["model"].removesuffix(f"-{step_name(run.step)}")
            of_runs.setdefault(name, []).append((run.step, run.record["mean"]))
    for run in runs:
        if run.num_examples < math.inf:
            of_models = curves.setdefault(f"{_title(run)} by training examples", {})
            of_models.setdefault(run.record["model"], []).append((run.num_examples, run.record["mean"]))
    found = {title: {name: sorted(points) for name, points in models.items() if len(points) > 1}
             for title, models in curves.items()}  # fmt: skip
    return [Chart(title, of_models) for title, of_models in found.items() if of_models]


def _title(run: Run) -> str:
    return f"{run.record['task']}: {run.record['metric']}"
