"""The page of a run, or of several over each other: recipe, curves, layout, starts and texts in one HTML file."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.plan.check_lines import run_lines
from ctxlm_ds.apps.report.charts import Chart, overlaid, page, read_metrics, run_charts, svg, table
from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import aligned
from ctxlm_ds.errors import DataError
from ctxlm_ds.process.run_history import START, read_history
from ctxlm_ds.recipe.load import dump_config, load_saved_config
from ctxlm_ds.recipe.problems import shortened
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import OBJECTIVES
from ctxlm_ds.training.hooks.hooks import Hook, RunEnd
from ctxlm_ds.training.hooks.metrics import METRICS_NAME, TEXTS, flat_settings

logger = logging.getLogger("ctxlm_ds")

PAGE_NAME = "report.html"
SHOWN_TEXTS = 4
"""Evaluations whose texts are shown, evenly spread."""
SHOWN_CHARACTERS = 400
NOT_SHOWN = {"event", "time_unix_s", "step", "environment", "attempt", "pid", "log"}
"""Facts of an event that another column or section has, or that are of no use in a page."""
LABELS = ("name", "run_dir")
"""Settings that name a run."""


@dataclass(frozen=True)
class RunRecord:
    """What a run directory records."""

    run_dir: Path
    config: RunConfig
    records: Sequence[Mapping[str, Any]]
    """Lines of metrics.jsonl."""
    events: Sequence[Mapping[str, Any]]
    """Lines of history.jsonl."""

    @property
    def environment(self) -> Mapping[str, Any]:
        """Layout, device and versions of the last start; empty if it is unknown."""
        return next((event["environment"] for event in reversed(self.events) if "environment" in event), {})


def read_run(run_dir: Path) -> RunRecord:
    """Read a run directory.

    Raises:
        DataError: the folder is no run, or its metrics are empty or damaged.
        ConfigError: its recipe is damaged, or of another version.
    """
    path = run_dir / METRICS_NAME
    if not path.is_file():
        advice = "give the directory of a run that has trained, such as runs/NAME, or a folder of runs"
        raise DataError(f"{path}: no such file; {advice}")
    try:
        records = read_metrics(path)
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}; resume the run, which repairs its end") from error
    if not all(isinstance(record, dict) and "step" in record for record in records):
        raise DataError(f"{path} is damaged: a line is no object with a step")
    if not records:
        raise DataError(f"{path} is empty: no step of the run is finished yet")
    return RunRecord(run_dir, load_saved_config(run_dir / "config.yaml"), records, read_history(run_dir))


def by_label(runs: Sequence[RunRecord]) -> dict[str, RunRecord]:
    """Return runs by the name of their recipe, or by their folder if several have the name."""
    names = [run.config.name for run in runs]
    return {name if names.count(name) == 1 else str(run.run_dir): run for name, run in zip(names, runs, strict=True)}


def charts_of(runs: Mapping[str, RunRecord]) -> list[Chart]:
    """Return the charts of a run, or of several over each other, that have a curve."""
    found = {
        label: run_charts(run.records, OBJECTIVES.get(run.config.objective.name).terms[0].name, {})
        for label, run in runs.items()
    }
    charts = overlaid(found) if len(found) > 1 else next(iter(found.values()))
    return [chart for chart in charts if any(chart.curves.values())]


def run_page(runs: Mapping[str, RunRecord], charts: Sequence[Chart]) -> str:
    """Return the page of runs by their labels."""
    single = len(runs) == 1

    def of_each(pieces: Mapping[str, list[str]]) -> list[str]:
        return [
            piece
            for label, of_run in pieces.items()
            if of_run
            for piece in ([] if single else [f"<h3>{escape(label)}</h3>"]) + of_run
        ]

    sections = {
        "Curves": [f"<h3>{escape(chart.title)}</h3>\n{svg(chart)}" for chart in charts],
        "Different settings": [] if single else [table(["setting", *runs], _different_settings(runs))],
        "Texts": of_each({label: _texts(run) for label, run in runs.items()}),
        "Layout and environment": of_each({label: _layout(run) for label, run in runs.items()}),
        "Starts and events": of_each({label: _events(run) for label, run in runs.items()}),
        "Recipe": of_each({label: [f"<pre>{escape(dump_config(run.config))}</pre>"] for label, run in runs.items()}),
    }
    return page(", ".join(runs), {heading: pieces for heading, pieces in sections.items() if pieces})


def comparison(runs: Mapping[str, RunRecord]) -> list[str]:
    """Return a table for the terminal: the last step and loss of each run, and the settings in which they differ."""
    rows = [["run", "step", "loss", "different settings"]]
    settings = {name: values for name, *values in _different_settings(runs) if name not in LABELS}
    for number, (label, run) in enumerate(runs.items()):
        last: Mapping[str, Any] = next((one for one in reversed(run.records) if one.get("loss") is not None), {})
        loss = f"{last['loss']:.4f}" if last else "-"
        different = " ".join(f"{name}={values[number]}" for name, values in settings.items())
        rows.append([label, str(last.get("step", "-")), loss, shortened(different, SHOWN_CHARACTERS)])
    return aligned(rows, left=(0, 3))


def _different_settings(runs: Mapping[str, RunRecord]) -> list[tuple[str, ...]]:
    """Return the name and the value in each run of every setting that is not the same in all."""
    settings = [flat_settings(run.config) for run in runs.values()]
    names = dict.fromkeys(name for each in settings for name in each)
    rows = [(name, *(str(each.get(name, "-")) for each in settings)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _texts(run: RunRecord) -> list[str]:
    """Return a table of what the model wrote after some evaluations."""
    found = [record for record in run.records if TEXTS in record]
    if not found:
        return []
    count = min(SHOWN_TEXTS, len(found))
    shown = [found[round(number * (len(found) - 1) / max(1, count - 1))] for number in range(count)]
    rows = [(str(record["step"]), given, written) for record in shown for given, written in record[TEXTS]]
    return [table(["step", "given", "written"], sorted(rows, key=lambda row: (row[1], int(row[0]))))]


def _layout(run: RunRecord) -> list[str]:
    environment = run.environment
    if not environment:
        return []
    lines = run_lines(run.config, environment["zero_stage"], environment["world_size"], run.run_dir)
    rows = [line.strip().split(": ", 1) for line in lines[1:]]
    known = {"zero_stage", "micro_batch_size", "precision", "sequence_parallel"}
    rows += [[name, str(value)] for name, value in environment.items() if name not in known and "parallel" not in name]
    return [table(["", ""], rows)]


def _events(run: RunRecord) -> list[str]:
    rows = [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time_unix_s"])),
            str(event["event"]),
            str(event.get("step", "")),
            shortened(", ".join(_facts(event)), SHOWN_CHARACTERS),
        )
        for event in run.events
    ]
    return [table(["time", "event", "step", ""], rows)] if rows else []


def _facts(event: Mapping[str, Any]) -> Iterator[str]:
    plain = {"reason", "why"}
    hidden = NOT_SHOWN | ({"last_step"} if event["event"] != START else set())
    for name, value in event.items():
        if name not in hidden and value not in (None, 0, False, ""):
            yield str(value) if name in plain else f"{name} {value}"


class ReportHook(Hook):
    """Writes RUN/report.html when a run ends; a failure of it is only a warning."""

    may_fail = True
    failures = (Exception,)

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def on_run_end(self, end: RunEnd) -> None:
        if (self._run_dir / METRICS_NAME).stat().st_size == 0:
            return  # nothing was measured
        runs = by_label([read_run(self._run_dir)])
        write_text(self._run_dir / PAGE_NAME, run_page(runs, charts_of(runs)))
        logger.info("  curves: %s", self._run_dir / PAGE_NAME)
