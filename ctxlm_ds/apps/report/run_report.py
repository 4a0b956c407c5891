"""Show the curves of runs: the loss in the terminal, all curves, recipe, layout, starts and texts in a page."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.report.charts import overlaid, page, run_charts, svg, table
from ctxlm_ds.atomic import write_text
from ctxlm_ds.checkpoint.ledger import read_ledger
from ctxlm_ds.console import aligned, logger
from ctxlm_ds.errors import DataError
from ctxlm_ds.process.run_files import METRICS_NAME, TEXTS, read_lines, read_status, read_value, read_verdict
from ctxlm_ds.process.run_history import read_history
from ctxlm_ds.recipe.load import dump_config, load_saved_config
from ctxlm_ds.recipe.problems import shortened
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import OBJECTIVES
from ctxlm_ds.training.hooks.curves import COLUMNS, Chart, figure_chart, points_of, terminal_picture
from ctxlm_ds.training.hooks.hooks import Hook, RunEnd

PAGE_NAME = "report.html"
MOST_POINTS, SHOWN_TEXTS, SHOWN_CHARACTERS = 2000, 4, 400
"""Points of a curve, evaluations with texts, and characters of a cell that are shown, about."""
NOT_SHOWN = {"event", "time_unix_s", "step", "environment", "attempt", "pid", "log"}
"""Facts of an event that another column or section has, or that are of no use in a page."""


@dataclass(frozen=True)
class RunRecord:
    """A run directory, its recipe, and the lines of its metrics.jsonl."""

    run_dir: Path
    config: RunConfig
    records: Sequence[Mapping[str, Any]]


def read_run(run_dir: Path) -> RunRecord:
    """Read a run directory. Raises DataError if no step is finished, ConfigError for a damaged or foreign recipe."""
    records = list(read_lines(run_dir / METRICS_NAME, MOST_POINTS))
    if not records:
        advice = "give the directory of a run that has finished a step, such as runs/NAME, or a folder of runs"
        raise DataError(f"{run_dir / METRICS_NAME} is missing or has no complete line; {advice}")
    return RunRecord(run_dir, load_saved_config(run_dir / "config.yaml"), records)


def by_label(runs: Sequence[RunRecord]) -> dict[str, RunRecord]:
    """Return runs by the name of their recipe, or by their folder if several have the name."""
    names = [run.config.name for run in runs]
    return {name if names.count(name) == 1 else str(run.run_dir): run for name, run in zip(names, runs, strict=True)}


def charts_of(runs: Mapping[str, RunRecord]) -> list[Chart]:
    """Return the charts of a run, or of several over each other, that have a curve."""
    found = {
        label: run_charts(run.records, OBJECTIVES.get(run.config.objective.name).terms[0].name)
        for label, run in runs.items()
    }
    charts = overlaid(found) if len(found) > 1 else next(iter(found.values()))
    if len(found) > 1:
        losses = {label: [figure_chart("loss (nats) by tokens", by_tokens(run), "loss", "loss")]
                  for label, run in runs.items()}  # fmt: skip
        charts = [*charts[:1], *overlaid(losses), *charts[1:]]
    return [chart for chart in charts if any(chart.curves.values())]


def by_tokens(run: RunRecord) -> list[dict[str, Any]]:
    """Return the lines with the tokens that the weights have read in place of the steps.

    A branch continues the count of its trunk. Those of `initialize_from` are added, if it has a ledger.
    """
    begun, tokens, lines = run.config.initialize_from, 0, []
    segments = takewhile(lambda one: one.initialized_from != begun, read_ledger(run.run_dir) if begun else ())
    before = sum(source["read"]["tokens"] or 0 for segment in segments for source in segment.sources)
    for record in run.records:
        tokens = read_value(record, "tokens", int) or tokens
        lines += [{**record, "step": before + tokens}] if tokens else []
    return lines


def run_page(runs: Mapping[str, RunRecord], charts: Sequence[Chart]) -> str:
    sections = {"Curves": [f"<h3>{escape(chart.title)}</h3>\n{svg(chart)}" for chart in charts]}
    if len(runs) > 1:
        head, *rows = comparison(runs)
        sections["Comparison"] = [table(head, rows)]
    for label, run in runs.items():
        title = "" if len(runs) == 1 else f"{label}: "
        events = read_history(run.run_dir)
        environments = [event["environment"] for event in events if isinstance(event.get("environment"), dict)]
        start: dict[str, Any] = environments[-1] if environments else {}
        tables: dict[str, tuple[list[str], Sequence[Sequence[str]]]] = {
            "verdict": ([], [[line] for line in read_verdict(read_status(run.run_dir))]),
            "texts": (["step", "given", "written"], _texts(run)),
            "layout and environment": (["", ""], [(name, str(value)) for name, value in start.items()]),
            "starts and events": (["time", "event", "step", ""], list(map(_event, events))),
        }
        sections |= {f"{title}{heading}": [table(*content)] for heading, content in tables.items() if content[1]}
        sections[f"{title}recipe"] = [f"<pre>{escape(dump_config(run.config))}</pre>"]
    return page(", ".join(runs), sections)


def comparison(runs: Mapping[str, RunRecord]) -> list[list[str]]:
    """Return a table with its head: the last step and loss of each run, and the settings in which they differ."""
    settings = [run.config.flat() for run in runs.values()]
    names = [name for name in dict.fromkeys(chain(*settings)) if name not in ("name", "run_dir")]
    different = [name for name in names if len({str(each.get(name, "-")) for each in settings}) > 1]
    rows = [["run", "step", "loss", "different settings"]]
    for (label, run), own in zip(runs.items(), settings, strict=True):
        step, loss = next(reversed(points_of(run.records, "loss")), (None, 0.0))
        values = " ".join(f"{name}={own.get(name, '-')}" for name in different)
        last = ["-", "-"] if step is None else [f"{step:.0f}", f"{loss:.4f}"]
        rows.append([label, *last, shortened(values, SHOWN_CHARACTERS)])
    return rows


def _texts(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return step, given and written text of some evaluations, by given text, the newest first."""
    found = [record for record in run.records if TEXTS in record]
    shown = found[:: -max(1, len(found) // SHOWN_TEXTS)]
    pairs = [(str(one["step"]), pair) for one in shown if isinstance(one[TEXTS], list) for pair in one[TEXTS]]
    rows = [(step, str(pair[0]), str(pair[1])) for step, pair in pairs if isinstance(pair, list) and len(pair) == 2]
    return sorted(rows, key=lambda row: row[1])


def _event(event: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return time, name, step and the other facts of an event."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time_unix_s"]))
    facts = [f"{name} {value}" for name, value in event.items() if name not in NOT_SHOWN and value]
    return when, str(event["event"]), str(event.get("step", "")), shortened(", ".join(facts), SHOWN_CHARACTERS)


class ReportHook(Hook):
    """Writes RUN/report.html when a run ends; a failure of it is only a warning."""

    may_fail = True
    failures = (Exception,)

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def on_run_end(self, end: RunEnd) -> None:
        if not any(read_lines(self._run_dir / METRICS_NAME)):
            return  # nothing was measured
        runs = by_label([read_run(self._run_dir)])
        write_text(self._run_dir / PAGE_NAME, run_page(runs, charts_of(runs)))
        logger.info("  curves: %s", self._run_dir / PAGE_NAME)


def main() -> None:
    from ctxlm_ds.apps.cluster.run_status import find_runs

    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("run_dirs", nargs="+", metavar="RUN", help="run directory or folder of runs; several runs are overlaid")
    add("--output", type=Path, metavar="FILE", help="page (default: RUN/report.html, here if several are named)")
    args = parser.parse_args()
    folders = find_runs(args.run_dirs)
    begun = [path for path in folders if not path.is_dir() or any(read_lines(path / METRICS_NAME))] or folders
    for folder in [path for path in folders if path not in begun]:
        print(f"{folder}: no step is finished yet; left out")
    runs = by_label(list(map(read_run, begun)))
    charts = charts_of(runs)
    columns = max(COLUMNS, min(160, shutil.get_terminal_size().columns - 12))
    print("\n".join(terminal_picture(charts[0], columns) if charts else []))
    if len(runs) > 1:
        print("\n".join(aligned(comparison(runs), left=(0, 3))))
    for label, run in runs.items():
        print("".join(f"verdict of {label}: {line}\n" for line in read_verdict(read_status(run.run_dir))), end="")
    given = begun if len(begun) == 1 else args.run_dirs
    output = args.output or (Path(given[0]) if len(given) == 1 else Path()) / PAGE_NAME
    write_text(output, run_page(runs, charts))
    print(f"all curves: {output}")
