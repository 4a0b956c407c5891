"""The status of a run on a terminal, redrawn in place below the log lines, in the width that there is."""

from __future__ import annotations

import atexit
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ctxlm_ds.process.run_files import FILE_ONLY
from ctxlm_ds.training.hooks.curves import LossCurves

logger = logging.getLogger("ctxlm_ds")

REFRESH_S = 0.25
CURVE_LINES, LEAST_CURVE_LINES = 8, 3
"""Most and fewest lines of the curve itself."""
AROUND_CURVE, LEFT_OF_CURVE = 3, 11
"""Lines below the curve (axis, steps, names), and columns before it (value, axis, a free one)."""
LEAST_CURVE_COLUMNS = 30


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
        console = self._live.console
        used = len(console.render_lines(status_view(self._title, cells, share, (done, *facts))))
        lines, columns = curve_lines(console.height, used), console.width - LEFT_OF_CURVE
        picture = curves.picture(columns, lines) if lines and columns >= LEAST_CURVE_COLUMNS else []
        view = status_view(self._title, cells, share, (done, *facts, *picture))
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
