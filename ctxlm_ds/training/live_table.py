"""The status of a run on a terminal, redrawn in place below the log lines, in the width that there is."""

from __future__ import annotations

import atexit
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger("ctxlm_ds")

REFRESH_S = 0.25
PADDING = 3
"""Columns of the terminal between two cells: a blank on both sides and the divider."""


class LiveTable:
    """A bar, a table and lines of facts."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._shown_s = 0.0
        self._live = Live(console=Console(stderr=True), auto_refresh=False, redirect_stdout=False)
        self._live.start()
        # Handlers must write through the live stream, or their lines would break the table.
        self._streams: list[tuple[logging.StreamHandler[Any], Any]] = []
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                self._streams.append((handler, handler.setStream(sys.stderr)))
        # After an error too, or the terminal would stay without a cursor.
        atexit.register(self.close)

    def is_due(self) -> bool:
        """Return whether the last view is old enough for the next."""
        return time.monotonic() - self._shown_s >= REFRESH_S

    def show(self, cells: Mapping[str, str], share: float, done: str, facts: Sequence[str]) -> None:
        """Draw the status (status_view)."""
        self._shown_s = time.monotonic()
        width = self._live.console.width
        self._live.update(status_view(self._title, cells, share, (done, *facts), width), refresh=True)

    def close(self) -> None:
        """Leave the last view and give the handlers their streams back."""
        atexit.unregister(self.close)
        self._live.stop()
        for handler, stream in self._streams:
            if stream is not None:
                handler.setStream(stream)


def status_view(title: str, cells: Mapping[str, str], share: float, texts: Sequence[str], width: int) -> Any:
    """Return what rich draws.

    Args:
        title: first line.
        cells: figures by heading, in as many rows as the width needs.
        share: of the run that is done, 0 to 1.
        texts: when the rest will be done, next to the bar, and lines below the figures.
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
