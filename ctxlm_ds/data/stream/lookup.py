"""Which rows of which source a stretch of the training stream holds: for logs, and to look at them.

In: the rows of a run, its recipe, positions of the stream. Out: sources, epochs and row numbers, in the stream's order
within each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.stream.blend import train_stream
from ctxlm_ds.data.stream.sampler import PlannedRows
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.source_rules import source_names

SHOWN_ROWS = 8


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Rows of one source in one of its epochs."""

    source: str
    """Its name in tables: data.train[i].name, or the last part of its path."""
    epoch: int
    rows: list[int]
    """Rows of the source's sample index; a row is a sample, or several where samples are packed (data.packing)."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class BatchRows:
    """Looks up stretches of a run's training stream."""

    def __init__(self, rows: RowSource, config: RunConfig) -> None:
        self._rows = rows
        self._stream = train_stream(rows, config)
        self._names = source_names(config)

    def plan(self, first: int, count: int) -> PlannedRows:
        """Rows and epochs at positions first to first + count - 1."""
        return self._stream.at(np.arange(first, first + count, dtype=np.int64))

    def titles(self, first: int, count: int) -> list[str]:
        """A name for the row at each of these positions."""
        planned = self.plan(first, count)
        sources, numbers = self._rows.sources(planned.rows)
        return [
            f"position {first + place}: {self._names[source]} row {number} in epoch {epoch}"
            for place, (source, number, epoch) in enumerate(zip(sources, numbers, planned.epochs, strict=True))
        ]

    def by_source(self, first: int, count: int) -> list[SourceRows]:
        """The same, source by source and epoch by epoch."""
        planned = self.plan(first, count)
        sources, numbers = self._rows.sources(planned.rows)
        found: dict[tuple[int, int], list[int]] = {}
        for source, epoch, number in zip(sources.tolist(), planned.epochs.tolist(), numbers.tolist(), strict=True):
            found.setdefault((source, epoch), []).append(number)
        return [SourceRows(self._names[source], epoch, rows) for (source, epoch), rows in sorted(found.items())]


def summary(found: Sequence[SourceRows]) -> str:
    """One line: `wiki epoch 0 rows 812, 97, 4051 and 29 more; books epoch 1 rows 5`."""
    return "; ".join(f"{part.source} epoch {part.epoch} rows {_short(part.rows)}" for part in found)


def _short(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:SHOWN_ROWS]))
    return shown if len(rows) <= SHOWN_ROWS else f"{shown} and {len(rows) - SHOWN_ROWS:,} more"
