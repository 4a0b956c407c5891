"""White-space words that a run reads, and the steps that its budget gives.

A dataset's JSON has the words of its text. An epoch reads each word of a source once, so a row reads, on average over
the stream, words / rows of its source. The words of a run are this number times the rows that it has read: a number
that no layout, worker or restart changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from ctxlm_ds.data.stream.blend import stream_shares
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.schema import RunConfig, TrainingConfig
from ctxlm_ds.recipe.sections import DataSection
from ctxlm_ds.recipe.source_rules import source_names
from ctxlm_ds.recipe.words import STEPS_FOLLOW

if TYPE_CHECKING:
    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.data.index.index import RowSource


def words_of(dataset: IndexedDataset, documents: tuple[int, int]) -> float | None:
    """Return the words of some documents, by their share of the dataset's tokens; None if it has no count."""
    words = (dataset.metadata or {}).get("words")
    first, after = dataset.first_tokens(dataset.arrays.documents[list(documents)]).tolist()
    return None if words is None else words * (after - first) / max(1, dataset.num_tokens)


def words_per_row(data: DataSection, training: TrainingConfig, rows: RowSource, at_words: Sequence[int] = ()) -> float:
    """Return the words that a row of the stream reads; 0.0 if a dataset has no count and the recipe needs none.

    Raises DataError if training.max_words or checkpoint.at_words needs one.
    """
    per_row = 0.0
    for index, share in zip(rows.indexes, stream_shares(rows, data, training), strict=True):
        words = words_of(index.dataset, tuple(index.meta["dataset"]["documents"]))
        if words is None:
            needs = {"training.max_words": training.max_words, "checkpoint.at_words": at_words}
            if named := [name for name, value in needs.items() if value]:
                raise DataError(
                    f"{index.dataset.prefix}: its JSON has no count of words, which {named[0]} needs; run ctxlm "
                    "preprocess again"
                )
            return 0.0
        per_row += share * words * index.meta["settings"]["num_duplicates"] / max(1, len(index))
    return per_row


def with_word_budget(config: RunConfig, rows: RowSource) -> tuple[RunConfig, float]:
    """Return the recipe with the steps that training.max_words gives, and the words that a row reads.

    Raises:
        ConfigError: training.max_steps is another number, or a source is read more often than data.max_epochs.
        DataError: as words_per_row.
    """
    training = config.training
    per_row = words_per_row(config.data, training, rows, config.checkpoint.at_words)
    if training.max_words is not None:
        needed = ceil(training.max_words / per_row)
        steps = bisect_left(range(STEPS_FOLLOW), needed, key=training.rows_after)
        if training.max_steps not in (STEPS_FOLLOW, steps):
            raise ConfigError(
                f"training.max_steps: {training.max_steps:,}, but training.max_words {training.max_words:,} gives "
                f"{steps:,} steps; set one of the two to null"
            )
        config = config.with_values("training", max_steps=steps)
        check_config(config, None)
    read = config.training.rows_after(config.training.max_steps - 1)  # the last step may begin one more epoch
    shares = stream_shares(rows, config.data, training)
    for name, share, index in zip(source_names(config.data), shares, rows.indexes, strict=True):
        refuse_epochs(config.data, name, share * read / max(1, len(index)))
    return config, per_row


def refuse_epochs(data: DataSection, name: str, epochs: float) -> None:
    """Raise ConfigError if a source is read more often than data.max_epochs."""
    if data.max_epochs is not None and epochs > data.max_epochs:
        raise ConfigError(
            f"data.max_epochs: {data.max_epochs:g}, but the run would read {name} {epochs:.2f} times; lower "
            "training.max_words or training.max_steps, or add text"
        )
