"""The status of a run on a terminal, redrawn in place below the log lines, in the width that there is."""

from __future__ import annotations

import atexit
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.report.charts import Chart, GrowingCurve, sampled_metrics, terminal_picture
from ctxlm_ds.process.output_log import FILE_ONLY

logger = logging.getLogger("ctxlm_ds")

REFRESH_S = 0.25
PADDING = 3
"""Columns of the terminal between two cells: a blank on both sides and the divider."""
CURVE_LINES, LEAST_CURVE_LINES = 8, 3
"""Most and fewest lines of the curve itself."""
CURVE_SHARE = 1 / 3
"""Share of the terminal's rows that the curve takes at most, with what is around it."""
TABLE_HEIGHT = 3
"""Rows of a row of figures: names, a line, values."""
AROUND_CURVE = 3
"""Lines below it: axis, steps, names."""
LEFT_OF_CURVE = 11
"""Columns before it: a value and the axis, and one that stays free."""
LEAST_CURVE_COLUMNS = 30


class LossCurves:
    """The loss in training and on each held-out source, for the picture below the table."""

    def __init__(self, step: int, metrics: Path) -> None:
        """Start after a step, with what metrics.jsonl has of the steps before."""
        self._training = GrowingCurve()
        self._held_out: dict[str, GrowingCurve] = {}
        for record in sampled_metrics(metrics):
            if record["step"] <= step:
                if (loss := record.get("loss")) is not None:
                    self.add(record["step"], loss)
                self.add_held_out(record["step"], record)

    def add(self, step: int, loss: float) -> None:
        """Add the training loss of a step."""
        self._training.add(step, loss)

    def add_held_out(self, step: int, figures: Mapping[str, Any]) -> None:
        """Add the figures `eval/SOURCE/loss` of an evaluation."""
        for name, loss in figures.items():
            if name.startswith("eval/") and name.endswith("/loss") and loss is not None:
                source = name.removeprefix("eval/").removesuffix("/loss")
                self._held_out.setdefault(source, GrowingCurve()).add(step, loss)

    def go_back(self, step: int) -> None:
        """Forget the steps after this one."""
        for curve in (self._training, *self._held_out.values()):
            curve.go_back(step)

    def picture(self, columns: int, lines: int) -> list[str]:
        """Return the lines of a picture with its axis and names; empty before the second point."""
        training = self._training.points
        if len(training) < 2:
            return []
        curves = {"training loss": training} | {name: curve.points for name, curve in self._held_out.items()}
        return terminal_picture(Chart("loss", curves, {}), columns, lines)[1:]


class LiveTable:
    """A bar, a table, lines of facts and the curve of the loss."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._shown_s = 0.0
        self.is_drawing = False
        """True while the view is written, which a signal's handler must not interrupt."""
        self._live = Live(console=Console(stderr=True), auto_refresh=False, redirect_stdout=False)
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

    def show(self, cells: Mapping[str, str], share: float, done: str, facts: Sequence[str], curves: LossCurves) -> None:
        """Draw the status (status_view), and the curves if the terminal has room for them."""
        self._shown_s = time.monotonic()
        width, height = self._live.console.size
        used = status_height(cells, facts, width)
        lines, columns = curve_lines(height, used), width - LEFT_OF_CURVE
        picture = curves.picture(columns, lines) if lines and columns >= LEAST_CURVE_COLUMNS else []
        view = status_view(self._title, cells, share, (done, *facts, *picture), width)
        self.is_drawing = True
        self._live.update(view, refresh=True)
        self.is_drawing = False

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


def status_height(cells: Mapping[str, str], facts: Sequence[str], width: int) -> int:
    """Return the rows of the terminal that title, bar, figures and facts take."""
    return 2 + TABLE_HEIGHT * len(fitting(cells, width)) + len(facts)


def curve_lines(height: int, used: int) -> int:
    """Return the lines of the curve on a terminal of `height` rows, of which others use some; 0 if it has no room."""
    lines = min(CURVE_LINES, int(height * CURVE_SHARE) - AROUND_CURVE, height - used - AROUND_CURVE - 1)
    return lines if lines >= LEAST_CURVE_LINES else 0


def status_view(title: str, cells: Mapping[str, str], share: float, texts: Sequence[str], width: int) -> Any:
    """Return what rich draws.

    Args:
        title: first line.
        cells: figures by heading, in as many rows as the width needs.
        share: of the run that is done, 0 to 1.
        texts: when the rest will be done, next to the bar, and lines below the figures (facts, the curve).
        width: columns of the terminal.
    """
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    done, *facts = texts
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(ProgressBar(total=1.0, completed=share), f"{share:.0%}  {done}")
    first, *lines = (Text(text, no_wrap=True, overflow="ellipsis") for text in (title, *facts))
    return Group(first, bar, *(_table(row) for row in fitting(cells, width)), *lines)


def fitting(cells: Mapping[str, str], width: int) -> list[dict[str, str]]:
    """Return the cells in rows of at most `width` columns of the terminal, each row as full as it can be."""
    rows: list[dict[str, str]] = [{}]
    used = 0
    for name, value in cells.items():
        needed = max(len(name), len(value)) + PADDING
        if rows[-1] and used + needed > width:
            rows.append({})
            used = 0
        rows[-1][name] = value
        used += needed
    return rows


def _table(cells: Mapping[str, str]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1), show_edge=False)
    for name in cells:
        style = "bold" if name in ("step", "loss") else None
        table.add_column(name, justify="right", style=style, no_wrap=True)
    table.add_row(*cells.values())
    return table
