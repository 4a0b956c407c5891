"""A benchmark's table, as aligned text and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ctxlm_ds.console import aligned

NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """Cells as text, the first column a name."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=tuple)
    """Lines below it."""

    def text(self) -> Iterator[str]:
        """Yield lines for a terminal."""
        yield self.title
        yield from aligned([self.header, *self.rows])
        yield from (f"  {note}" for note in self.notes)

    def markdown(self) -> Iterator[str]:
        """Yield lines for a document."""
        yield from (f"**{self.title}**", "")
        yield _markdown_row(self.header)
        yield _markdown_row(["---"] + ["---:"] * (len(self.header) - 1))
        yield from map(_markdown_row, self.rows)
        if self.notes:
            yield ""
            yield from self.notes


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def spread(values: Sequence[float], form: str) -> str:
    """Return the median with the smallest and the largest value: `2.0 (1.9 to 2.2)`."""
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"
