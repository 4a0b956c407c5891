"""The rows that the model sees, as text: rich Text with their masks, labels and boundaries.

The objective renders its sequences: `[CLS] the [MASK→cat] sat`. Documents without an objective: dataset/inspection.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxlm_ds.data.fields import Objective
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.data.stream.blend import train_stream
from ctxlm_ds.data.stream.loader import TRAIN_MASKS, BatchBuilder
from ctxlm_ds.data.stream.sampler import PlannedRows, RowOrder
from ctxlm_ds.recipe.schema import RunConfig

if TYPE_CHECKING:
    from rich.text import Text

    from ctxlm_ds.tokenizers.base import Tokenizer


def preview_rows(
    rows: RowSource, objective: Objective, tokenizer: Tokenizer, config: RunConfig, count: int
) -> Iterator[Text]:
    """Yield the first `count` rows that training reads, with exactly their masks there.

    Rows of other sources than data.train's (a single dataset to look at) have the order of a run on them alone.
    """
    is_blend = len(rows.indexes) == len(config.data.train)
    stream = train_stream(rows, config) if is_blend else RowOrder(len(rows), config.training.seed)
    planned = stream.at(np.arange(min(count, len(rows)), dtype=np.int64))
    yield from preview_planned(rows, objective, tokenizer, config, planned, [f"row {row}" for row in planned.rows])


def preview_planned(
    rows: RowSource,
    objective: Objective,
    tokenizer: Tokenizer,
    config: RunConfig,
    planned: PlannedRows,
    titles: Sequence[str],
) -> Iterator[Text]:
    """Yield these rows with exactly their masks in training, each under its title."""
    builder = BatchBuilder(rows, objective, config, config.training.seed, TRAIN_MASKS)
    labels = rows.indexes[0].format.sequence_labels
    render = partial(objective.render, tokenizer=tokenizer)
    examples, row_starts = builder.examples(planned)
    for title, begin, end in zip(titles, row_starts[:-1], row_starts[1:], strict=True):
        sequences = [examples.example(number) for number in range(begin, end)]
        yield render_row(sequences, title, config.data.seq_length, labels, render)


def render_row(
    examples: Sequence[Any], title: str, seq_length: int, labels: Sequence[str], render: Callable[[Any], Text]
) -> Text:
    """Return a row: a line of figures, then each of its sequences as `render` shows it.

    Args:
        labels: the meaning of each label of a sequence (SampleFormat.sequence_labels).
    """
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
