"""Names for rows of the training stream: their source, epoch and number, for logs and to look at rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.stream.blend import train_stream
from ctxlm_ds.data.stream.sampler import PlannedRows
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.source_rules import source_names

SHOWN_ROWS = 8


class SourceRows(NamedTuple):
    """Rows of one source in one of its epochs."""

    source: str
    """Name in tables: data.train[i].name, or the last part of the path."""
    epoch: int
    rows: list[int]
    """Rows of the source's sample index; a row is a sample, or several if samples are packed (data.packing)."""


class BatchRows:
    """The rows of a run by their position in the training stream."""

    def __init__(self, rows: RowSource, config: RunConfig) -> None:
        self._rows = rows
        self._stream = train_stream(rows, config)
        self._names = source_names(config)

    def plan(self, first: int, count: int) -> PlannedRows:
        """Return the rows and epochs at positions first to first + count - 1."""
        return self._stream.at(np.arange(first, first + count, dtype=np.int64))

    def titles(self, first: int, count: int) -> list[str]:
        """Return a name for the row at each of these positions."""
        return [
            f"position {position}: {self._names[source]} row {number} in epoch {epoch}"
            for position, (source, epoch, number) in enumerate(self._located(first, count), start=first)
        ]

    def by_source(self, first: int, count: int) -> list[SourceRows]:
        """Return the rows at these positions by source and epoch, in the stream's order within each."""
        found: dict[tuple[int, int], list[int]] = {}
        for source, epoch, number in self._located(first, count):
            found.setdefault((source, epoch), []).append(number)
        return [SourceRows(self._names[source], epoch, rows) for (source, epoch), rows in sorted(found.items())]

    def _located(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Return the source, its epoch and the row's number in it at each of these positions."""
        planned = self.plan(first, count)
        sources, numbers = self._rows.sources(planned.rows)
        return zip(sources.tolist(), planned.epochs.tolist(), numbers.tolist(), strict=True)


def summary(found: Sequence[SourceRows]) -> str:
    """Return one line: `wiki epoch 0 rows 812, 97, 4051 and 29 more; books epoch 1 rows 5`."""
    return "; ".join(f"{part.source} epoch {part.epoch} rows {_short(part.rows)}" for part in found)


def _short(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:SHOWN_ROWS]))
    return shown if len(rows) <= SHOWN_ROWS else f"{shown} and {len(rows) - SHOWN_ROWS:,} more"
