"""What a run reads: its white-space words, the steps that a budget of them gives, and tables of its sources.

A dataset's JSON has the words of its text. An epoch reads each word of a source once, so a row reads, on average over
the stream, words / rows of its source. The words of a run are this number times the rows that it has read: a number
that no layout, worker or restart changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import ceil

import numpy as np

from ctxlm_ds.console import aligned
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.index.index import RowSource, SampleIndex
from ctxlm_ds.data.index.record import RECORDS_AT_ONCE
from ctxlm_ds.data.stream.blend import stream_shares
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.schema import EvaluationConfig, RunConfig, TrainingConfig
from ctxlm_ds.recipe.sections import DataSection
from ctxlm_ds.recipe.source_rules import source_names
from ctxlm_ds.recipe.words import STEPS_FOLLOW

TRAIN_HEAD = ("source", "documents", "tokens an epoch", "rows an epoch", "share", "epochs", "tokens read")
QUANTILES = (0.05, 0.5, 0.95)
INDEX_HEAD = ("sample index", "sentences", "samples", "a row", "padding")
HELD_OUT_HEAD = ("held out", "documents", "tokens", "rows", "evaluated")


def words_of(dataset: IndexedDataset, documents: tuple[int, int]) -> float | None:
    """Return the words of some documents, by their share of the dataset's tokens; None if it has no count."""
    words = (dataset.metadata or {}).get("words")
    first, after = dataset.token_range(documents)
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


def with_word_budget(config: RunConfig, rows: RowSource, first_row: int = 0) -> tuple[RunConfig, float]:
    """Return the recipe with the steps that training.max_words gives from a row on, and the words that a row reads.

    Raises:
        ConfigError: training.max_steps is another number, or a source is read more often than data.max_epochs.
        DataError: as words_per_row.
    """
    training = config.training
    per_row = words_per_row(config.data, training, rows, config.checkpoint.at_words)
    if training.max_words is not None:
        end = first_row + ceil(training.max_words / per_row)
        steps = bisect_left(range(STEPS_FOLLOW), end, key=partial(training.rows_after, rows_read=first_row))
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


def plan_lines(
    data: DataSection,
    training: TrainingConfig,
    evaluation: EvaluationConfig,
    train: RowSource,
    held_out: Mapping[str, RowSource],
    steps_done: int = 0,
    rows_read: int = 0,
) -> list[str]:
    """Return lines that say what the run reads from its first step to training.max_steps; tokens include special ones.

    Before this start the run has done `steps_done` steps and read `rows_read` rows; its global batch size may have been
    another then, and may grow.
    Raises DataError if a source that must have a share has no row.
    """
    steps = max(0, training.max_steps - steps_done)
    total_rows, first = training.rows_after(steps, rows_read), training.batch_size_at(rows_read)
    size = f"{f'{first:,} to ' if first < training.global_batch_size else ''}{training.global_batch_size:,}"
    past = f"has read {rows_read:,} rows in {steps_done:,} steps and " if steps_done else ""
    is_known = training.max_steps < STEPS_FOLLOW
    number = f"{steps:,}" if is_known else "as many"
    amount = f": {total_rows:,} rows{' in all' if steps_done else ''}" if is_known else " as its hours allow"
    lines = [
        f"the run {past}reads {number} {'more ' if steps_done else ''}steps of {size} rows of {data.seq_length} "
        f"positions{amount}{_limits(training)}; {_blend(data)}",
        *aligned([TRAIN_HEAD, *_train_rows(data, training, train, total_rows if is_known else 0)]),
    ]
    if held_out:
        table: list[tuple[str, ...]] = [HELD_OUT_HEAD]
        for name, source in held_out.items():
            documents, tokens = (sum(index.meta[key] for index in source.indexes) for key in ("documents", "tokens"))
            evaluated = min(evaluation.max_rows, len(source))
            table.append((name, *(f"{number:,}" for number in (documents, tokens, len(source), evaluated))))
        lines += aligned(table)
    return lines


def _train_rows(
    data: DataSection, training: TrainingConfig, train: RowSource, total_rows: int
) -> Iterator[tuple[str, ...]]:
    names, shares = source_names(data), stream_shares(train, data, training)
    figures: list[tuple[int, ...]] = []
    for index, share in zip(train.indexes, shares, strict=True):
        documents, tokens, rows = int(index.meta["documents"]), int(index.meta["tokens"]), len(index)
        figures.append((documents, tokens, rows, round(share * total_rows / max(1, rows) * tokens)))
    if len(figures) > 1:
        names, shares = [*names, "together"], [*shares, 1.0]
        figures.append(tuple(map(sum, zip(*figures, strict=True))))
    for name, share, (documents, tokens, rows, read) in zip(names, shares, figures, strict=True):
        epochs = share * total_rows / max(1, rows)
        yield name, f"{documents:,}", f"{tokens:,}", f"{rows:,}", f"{share:.2%}", f"{epochs:.2f}", f"{read:,}"


def _limits(training: TrainingConfig) -> str:
    limits = [
        f"{name} {value:,}"
        for name, value in (("max_tokens", training.max_tokens), ("max_hours", training.max_hours))
        if value is not None
    ]
    return f" (unless {' or '.join(limits)} ends it before)" if limits else ""


def _blend(data: DataSection) -> str:
    words = {
        "concatenate": "each source in full, then again for its epochs",
        "in_order": "sources one after another, not shuffled",
        "weighted": "sources by weight",
        "temperature": f"sources by rows^(1/{data.temperature:g})",
        "megatron": "sources in Megatron's order",
    }
    drawn = "" if data.split_seed is None else f" by tokens, documents drawn with seed {data.split_seed}"
    return words[data.blend] + (f", split {data.split}{drawn}" if data.split is not None else "")


def summary_lines(indexes: Mapping[str, SampleIndex]) -> Iterator[str]:
    """Yield a table of the indexes by name, then the folder and settings of each."""
    labels = {index.format.sequence_labels[:1] for index in indexes.values()}
    head = (*INDEX_HEAD, *max(labels, default=()), "lengths")
    yield from aligned([head, *(_index_row(name, index) for name, index in indexes.items())])
    yield f"  lengths: tokens of a sample at {', '.join(f'{share:.0%}' for share in QUANTILES)}"
    for name, index in indexes.items():
        settings = index.meta["settings"]
        packed = f", up to {settings['max_sequences_per_row']} sequences a row" if settings["packing"] else ""
        static = ", static masks" if index.is_static else ""
        kind = f"{settings['sample_format']}, {settings['seq_length']} positions{packed}{static}"
        yield f"  {name}: {kind}, in {index.directory}"


def _index_row(name: str, index: SampleIndex) -> tuple[str, ...]:
    meta, passes = index.meta, index.meta["settings"]["num_duplicates"]
    positions = max(1, len(index)) * meta["settings"]["seq_length"]
    labels = index.records["is_random"] if index.format.sequence_labels else None
    counts = np.zeros(meta["settings"]["seq_length"] + 1, dtype=np.int64)
    for begin in range(0, len(index.records), RECORDS_AT_ONCE):  # an index may be larger than memory
        counts += np.bincount(index.records["num_tokens"][begin : begin + RECORDS_AT_ONCE], minlength=len(counts))
    places = np.maximum(1, np.ceil(np.multiply(QUANTILES, counts.sum())))
    lengths = np.minimum(np.searchsorted(np.cumsum(counts), places), len(counts) - 1)
    return (
        name,
        f"{meta['sentences']:,}",
        f"{meta['samples']:,} ({passes} pass{'' if passes == 1 else 'es'})",
        f"{meta['samples'] / max(1, meta['rows']):.2f}",
        f"{1 - meta['tokens'] / positions:.1%}",
        *(() if labels is None else (f"{(labels == 0).mean():.1%}" if len(labels) else "-",)),
        " ".join(map(str, lengths)),
    )
