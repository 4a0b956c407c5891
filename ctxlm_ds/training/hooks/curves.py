"""Curves over the steps of a run, their picture in characters for a terminal, and the live table below it."""

from __future__ import annotations

import atexit
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.console import logger
from ctxlm_ds.process.run_files import FILE_ONLY, HELD_OUT, read_lines, read_value

COLUMNS, LINES = 64, 12
"""Characters of a picture."""
MARKS = ".o+x*#@%"
TRAINING = "training"
LEAST, MOST = 1e-9, 1e300
"""Least height and greatest value of a curve."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Curves over the steps of a run."""

    title: str
    curves: Mapping[str, Points]

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """First and last step, least and greatest value; never equal."""
        points = [point for curve in self.curves.values() for point in curve]
        steps = [step for step, _ in points] or [0.0]
        values = [value for _, value in points] or [0.0]
        low, high = min(values), max(values)
        if high - low <= LEAST * max(abs(low), LEAST):
            high = low + (abs(low) if abs(low) > LEAST else 1.0)
        return min(steps), max(max(steps), min(steps) + 1), low, high


def terminal_picture(chart: Chart, columns: int = COLUMNS, lines: int = LINES) -> list[str]:
    """Draw a chart with characters: a line of the picture for each string, the legend last."""
    first, last, low, high = chart.bounds
    cells = [[" "] * columns for _ in range(lines)]

    def row(value: float) -> int:
        return round((lines - 1) * (high - value) / (high - low))

    for mark, points in zip(MARKS, chart.curves.values(), strict=False):
        for step, value in points:
            cells[row(value)][round((columns - 1) * (step - first) / (last - first))] = mark
    shown = {0: f"{high:.3g}", lines - 1: f"{low:.3g}"}
    picture = [f"{shown.get(number, ''):>8} |{''.join(line)}".rstrip() for number, line in enumerate(cells)]
    legend = [f"{mark} {name}" for mark, name in zip(MARKS, chart.curves, strict=False)]
    steps = f"{'':>9} {f'step {first:.0f}':<{columns - 8}}{f'{last:.0f}':>8}"
    axis = f"{'':>8} +{'-' * columns}"
    return [f"{'':>9} {chart.title}", *picture, axis, steps, f"{'':>9} {'   '.join(legend)}"]


def points_of(records: Iterable[Mapping[str, Any]], figure: str) -> Points:
    """Return (step, value) of each line that has a finite figure."""
    found = ((record["step"], read_value(record, figure, float, MOST)) for record in records)
    return [(float(step), value) for step, value in found if value is not None]


def figure_chart(title: str, records: Sequence[Mapping[str, Any]], trained: str, figure: str) -> Chart:
    """Return the figures `trained` in training and `figure` on each held-out source, from lines of metrics.jsonl."""
    sources = dict.fromkeys(name.split("/")[1] for record in records for name in record if name.startswith(HELD_OUT))
    held_out = {name: points_of(records, f"{HELD_OUT}{name}/{figure}") for name in sources}
    return Chart(title, {TRAINING: points_of(records, trained), **held_out})


REFRESH_S = 0.25
LIVE_POINTS = 500
"""Most points of the curve in training, about."""
READ_SHARE = 0.01
"""Most of the time that reading metrics.jsonl again takes."""
CURVE_LINES, LEAST_CURVE_LINES = 8, 3
"""Most and fewest lines of the curve itself."""
AROUND_CURVE, LEFT_OF_CURVE = 3, 11
"""Lines below the curve (axis, steps, names), and columns before it (value, axis, a free one)."""
LEAST_CURVE_COLUMNS = 30


class LiveTable:
    """A bar, a table, lines of facts and the curve of the loss."""

    def __init__(self, title: str, metrics: Path) -> None:
        """Begin to draw; `metrics` is the metrics.jsonl with the curves."""
        from rich.console import Console
        from rich.live import Live

        self._title, self._metrics = title, metrics
        self._shown_s = self._read_again_s = 0.0
        self.is_drawing = False
        """True while the view is written, which a signal's handler must not interrupt."""
        self._live = Live(console=Console(stderr=True, emoji=False), auto_refresh=False, redirect_stdout=False)
        self._live.start()
        # Handlers must write through the live stream, or their lines would break the table.
        self._streams: list[tuple[logging.StreamHandler[Any], Any]] = []
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                self._streams.append((handler, handler.setStream(sys.stderr)))
                handler.addFilter(_is_for_terminals)
        # After an error too, or the terminal would stay without a cursor.
        atexit.register(self.close)

    def is_due(self) -> bool:
        """Return whether the last view is old enough for the next."""
        return time.monotonic() - self._shown_s >= REFRESH_S

    def show(
        self, cells: Mapping[str, str], share: float, done: str, facts: Sequence[str], is_last: bool = False
    ) -> None:
        """Draw the status (status_view), and the curves if the terminal has room for them."""
        self._shown_s = time.monotonic()
        if is_last:
            self._read_again_s = 0.0
        console = self._live.console
        used = len(console.render_lines(status_view(self._title, cells, share, (done, *facts))))
        lines, columns = curve_lines(console.height, used), console.width - LEFT_OF_CURVE
        picture = self._picture(columns, lines) if lines and columns >= LEAST_CURVE_COLUMNS else []
        view = status_view(self._title, cells, share, (done, *facts, *picture))
        self.is_drawing = True
        self._live.update(view, refresh=True)
        self.is_drawing = False

    def _picture(self, columns: int, lines: int) -> list[str]:
        """Return the curves' lines without a title; empty before the second point."""
        began_s = time.monotonic()
        if began_s >= self._read_again_s:
            self._chart = figure_chart("loss", list(read_lines(self._metrics, LIVE_POINTS)), "loss", "loss")
            self._read_again_s = began_s + (time.monotonic() - began_s) / READ_SHARE
        return terminal_picture(self._chart, columns, lines)[1:] if len(self._chart.curves[TRAINING]) > 1 else []

    def close(self) -> None:
        """Leave the last view and give the handlers their streams back."""
        atexit.unregister(self.close)
        self._live.stop()
        for handler, stream in self._streams:
            handler.removeFilter(_is_for_terminals)
            if stream is not None:
                handler.setStream(stream)


def _is_for_terminals(record: logging.LogRecord) -> bool:
    return not any(getattr(record, name, False) for name in FILE_ONLY)


def curve_lines(height: int, used: int) -> int:
    """Return the lines of the curve, at most a third of `height` rows with its axis; 0 if the others leave no room."""
    lines = min(CURVE_LINES, height // 3 - AROUND_CURVE, height - used - AROUND_CURVE - 1)
    return lines if lines >= LEAST_CURVE_LINES else 0


def status_view(title: str, cells: Mapping[str, str], share: float, texts: Sequence[str]) -> Any:
    """Return what rich draws: the title, a bar with the first text, the figures by heading, a line for each other text.

    `share` is the share of the run that is done, 0 to 1. The figures take as many rows as the width needs.
    """
    from rich.columns import Columns
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    done, *facts = texts
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(ProgressBar(total=1.0, completed=share), f"{share:.0%}  {done}")
    figures = [Text(f"{name}\n{value}", justify="right") for name, value in cells.items()]
    first, *lines = (Text(text, no_wrap=True, overflow="ellipsis") for text in (title, *facts))
    return Group(first, bar, Columns(figures, padding=(0, 1)), *lines)
