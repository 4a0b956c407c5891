"""Steps of short documents in memory: packed into rows, or each in a row that is padded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.index.build import fit_rows
from ctxlm_ds.data.sample import Batch, Examples, starts_of
from ctxlm_ds.data.stream.collate import collate_arrays, to_batches
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.objectives.base import Objective
from ctxlm_ds.recipe.schema import RunConfig
from tools.benchmark.batches import as_step

MEAN_LENGTH, SHORTEST, LONGEST = 60, 8, 128
MASKED_SHARE = 0.15
FIRST_WORD = 5
"""Ids below are left to special tokens."""
NUM_STEPS = 4

Lengths = NDArray[np.int64]


def drawn_lengths(count: int, seed: int) -> Lengths:
    """Draw [count] lengths between SHORTEST and LONGEST with a mean of about MEAN_LENGTH (a gamma distribution)."""
    lengths = np.random.default_rng(seed).gamma(3.0, MEAN_LENGTH / 3.0, count).round().astype(np.int64)
    return np.clip(lengths, SHORTEST, LONGEST)


def dataset_lengths(prefix: str, count: int, seed: int) -> Lengths:
    """Draw [count] documents of a dataset and return their lengths, cut to those of drawn_lengths.

    Raises:
        DataError: the dataset is missing or damaged.
    """
    from ctxlm_ds.data.dataset.reader import IndexedDataset

    dataset = IndexedDataset(prefix)
    ends = np.concatenate([[0], np.cumsum(dataset.lengths(0, len(dataset)), dtype=np.int64)])
    sizes = np.diff(ends[dataset.document_indices])
    return np.clip(np.random.default_rng(seed).choice(sizes, count), SHORTEST, LONGEST)


def rows_of(lengths: Lengths, config: RunConfig) -> list[Lengths]:
    """Return the lengths of each row's documents: one, or as many as data.packing puts together."""
    data = config.data
    if not data.shares_rows:
        return np.split(lengths, len(lengths))
    numbers, counts = fit_rows(lengths, data.seq_length, data.sequences_per_row)
    return np.split(lengths[numbers], np.cumsum(counts)[:-1])


def document_steps(config: RunConfig, objective: Objective, lengths: Lengths, longest_of_batch: bool) -> list[Step]:
    """Make steps of documents of these lengths, as many as fill NUM_STEPS.

    Args:
        config: packs rows or not; training says how many rows a micro-batch and a step have.
        objective: writes the fields.
        lengths: of the documents, enough of them.
        longest_of_batch: True if the rows of a micro-batch end with its longest document.
    """
    draws = np.random.default_rng(config.training.seed)
    rows = rows_of(lengths, config)
    micro, size = config.training.micro_batch_size, config.training.global_batch_size
    chosen = draws.permutation(len(rows))[: NUM_STEPS * size].reshape(NUM_STEPS, size // micro, micro)

    def batch(numbers: NDArray[np.int64]) -> Batch:
        return _batch(config, objective, [rows[number] for number in numbers], draws, longest_of_batch)

    return [as_step([batch(numbers) for numbers in step], objective) for step in chosen]


def _batch(
    config: RunConfig, objective: Objective, rows: list[Lengths], draws: np.random.Generator, longest_of_batch: bool
) -> Batch:
    data = config.data
    if longest_of_batch:
        data = data.model_copy(update={"seq_length": max(int(row.sum()) for row in rows)})
    assert config.model.vocab_size is not None
    examples = _examples(np.concatenate(rows), config.model.vocab_size, draws)
    fields = objective.fields(data)
    flat = collate_arrays(objective, fields, examples, starts_of(np.array([len(row) for row in rows])))
    return to_batches(flat, fields, len(rows))[0]


def _examples(lengths: Lengths, vocab_size: int, draws: np.random.Generator) -> Examples:
    """Return documents of random words; MASKED_SHARE of each is predicted."""
    counts = np.maximum(1, (MASKED_SHARE * lengths).astype(np.int64))
    positions = [np.sort(draws.choice(n, k, replace=False)) for n, k in zip(lengths, counts, strict=True)]
    total = int(counts.sum())
    return Examples(
        input_ids=draws.integers(FIRST_WORD, vocab_size, int(lengths.sum()), dtype=np.int32),
        starts=starts_of(lengths),
        second_starts=lengths.copy(),
        sequence_labels=np.zeros(len(lengths), dtype=np.int8),
        prediction_positions=np.concatenate(positions).astype(np.int32),
        prediction_labels=draws.integers(FIRST_WORD, vocab_size, total, dtype=np.int32),
        prediction_starts=starts_of(counts),
    )
