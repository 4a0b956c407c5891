"""Rows of the training stream for people: their names in logs, and as text with masks, labels and boundaries.

The objective renders its sequences: `[CLS] the [MASK→cat] sat`. Documents without an objective: dataset/inspection.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.data.stream.blend import LaneOrder, PlannedRows, RowOrder, RowStream, train_stream
from ctxlm_ds.data.stream.loader import TRAIN_MASKS, BatchBuilder
from ctxlm_ds.recipe.schema import TrainingConfig
from ctxlm_ds.recipe.sections import DataSection
from ctxlm_ds.recipe.source_rules import source_names

if TYPE_CHECKING:
    from rich.text import Text

    from ctxlm_ds.objectives.base import Objective
    from ctxlm_ds.tokenizers.base import Tokenizer

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

    def __init__(self, rows: RowSource, data: DataSection, training: TrainingConfig) -> None:
        self._rows = rows
        self._stream = train_stream(rows, data, training)
        self._names = source_names(data)

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


def preview_rows(
    rows: RowSource, objective: Objective, tokenizer: Tokenizer, data: DataSection, training: TrainingConfig, count: int
) -> Iterator[Text]:
    """Yield the first `count` rows that training reads, with exactly their masks there.

    Rows of other sources than data.train's (a single dataset to look at) have the order of a run on them alone.
    """
    is_blend = len(rows.indexes) == len(data.train)
    if data.in_lanes:  # an excerpt may have too few rows
        stream: RowStream = LaneOrder(len(rows), min(len(rows), training.global_batch_size))
    else:
        stream = train_stream(rows, data, training) if is_blend else RowOrder(len(rows), training.seed)
    planned = stream.at(np.arange(min(count, len(rows)), dtype=np.int64))
    yield from preview_planned(
        rows, objective, tokenizer, data, training.seed, planned, [f"row {row}" for row in planned.rows]
    )


def preview_planned(
    rows: RowSource,
    objective: Objective,
    tokenizer: Tokenizer,
    data: DataSection,
    seed: int,
    planned: PlannedRows,
    titles: Sequence[str],
) -> Iterator[Text]:
    """Yield these rows with exactly their masks in training, each under its title."""
    labels = rows.indexes[0].format.sequence_labels
    render = partial(objective.render, tokenizer=tokenizer)
    examples, row_starts = BatchBuilder(rows, objective, data, seed, TRAIN_MASKS).examples(planned)
    for title, begin, end in zip(titles, row_starts[:-1], row_starts[1:], strict=True):
        sequences = [examples.example(number) for number in range(begin, end)]
        yield render_row(sequences, title, data.seq_length, labels, render)


def render_row(
    examples: Sequence[Any], title: str, seq_length: int, labels: Sequence[str], render: Callable[[Any], Text]
) -> Text:
    """Return a row: a line of figures, then each of its sequences as `render` shows it, with the name of its label."""
    from rich.text import Text

    used = sum(len(example.input_ids) for example in examples)
    predictions = sum(len(example.prediction_positions) for example in examples)
    text = Text()
    text.append(f"{title}: {used} of {seq_length} positions, {predictions} predictions\n", style="bold")
    for number, example in enumerate(examples, start=1):
        label = labels[example.sequence_label] if example.sequence_label != NO_LABEL else ""
        if len(examples) > 1 or label:
            place = f"sequence {number} of {len(examples)}" if len(examples) > 1 else ""
            text.append(f"  {': '.join(filter(None, (place, label)))}\n", style="magenta")
        text.append("  ").append_text(render(example)).append("\n")
    return text
