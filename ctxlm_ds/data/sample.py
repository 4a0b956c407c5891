"""The values handed from samples to the model: Samples -> (objective) -> Examples -> (collate) -> Batch.

The sequences of a micro-batch lie in flat arrays one after another, so that compiled loops take them as they are: what
belongs to sequence i of t tokens in all is `input_ids[starts[i] : starts[i + 1]]`. Sample and Example are one of them.

Shape letters: c sequences of a micro-batch, t their tokens together, q their predictions together; n tokens of one
sequence, k its predictions; b rows of a micro-batch, s positions of a row, p prediction slots of a row, m sequences of
a row (1 without packing).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

IGNORE_LABEL = -100
NO_LABEL = -1


@dataclass(frozen=True, slots=True)
class Sample:
    """One input sequence before corruption, special tokens in place.

    For causal_lm the last token is no input: it is what the last input predicts, and may be another sample's first.
    """

    input_ids: NDArray[np.int32]
    """[n]"""
    token_type_ids: NDArray[np.int32]
    """[n], 0 for [CLS] A [SEP], 1 for B [SEP]."""
    special_mask: NDArray[np.bool_]
    """[n], True where a special token was inserted by the sample builder (CLS, SEP, separators)."""
    is_random_next: int
    """0 B follows A, 1 B is from another document, NO_LABEL where the format has no such label."""


@dataclass(frozen=True, slots=True)
class Example:
    """One input sequence after corruption."""

    input_ids: NDArray[np.int32]
    """[n]"""
    token_type_ids: NDArray[np.int32]
    """[n]"""
    prediction_positions: NDArray[np.int32]
    """[k], ascending."""
    prediction_labels: NDArray[np.int32]
    """[k], the original ids."""
    is_random_next: int


class Samples(NamedTuple):
    """The sequences of a micro-batch before corruption (Sample says more)."""

    input_ids: NDArray[np.int32]
    """[t]"""
    special_mask: NDArray[np.bool_]
    """[t]"""
    starts: NDArray[np.int64]
    """[c + 1]"""
    second_starts: NDArray[np.int64]
    """[c], position in the sequence from which token types are 1, its length where none is."""
    is_random_next: NDArray[np.int8]
    """[c]"""
    keys: NDArray[np.uint64]
    """[c, 3], the integers that a sequence's random words are keyed by: sample number, epoch, index."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[c] tokens of each sequence."""
        return np.diff(self.starts)

    def sample(self, number: int) -> Sample:
        """Sequence `number` on its own."""
        begin, end = int(self.starts[number]), int(self.starts[number + 1])
        types = token_types(end - begin, int(self.second_starts[number]))
        return Sample(self.input_ids[begin:end], types, self.special_mask[begin:end], int(self.is_random_next[number]))


class Examples(NamedTuple):
    """The sequences of a micro-batch after corruption (Example says more)."""

    input_ids: NDArray[np.int32]
    """[t]"""
    starts: NDArray[np.int64]
    """[c + 1]"""
    second_starts: NDArray[np.int64]
    """[c], as in Samples."""
    is_random_next: NDArray[np.int8]
    """[c]"""
    prediction_positions: NDArray[np.int32]
    """[q], within the sequence, ascending in each."""
    prediction_labels: NDArray[np.int32]
    """[q]"""
    prediction_starts: NDArray[np.int64]
    """[c + 1], sequence i has predictions prediction_starts[i] to prediction_starts[i + 1]."""

    def example(self, number: int) -> Example:
        """Sequence `number` on its own."""
        begin, end = int(self.starts[number]), int(self.starts[number + 1])
        predictions = slice(int(self.prediction_starts[number]), int(self.prediction_starts[number + 1]))
        return Example(
            self.input_ids[begin:end],
            token_types(end - begin, int(self.second_starts[number])),
            self.prediction_positions[predictions],
            self.prediction_labels[predictions],
            int(self.is_random_next[number]),
        )


def token_types(length: int, second_start: int) -> NDArray[np.int32]:
    """[length] 0, and 1 from `second_start` on."""
    return (np.arange(length) >= second_start).astype(np.int32)


def empty_samples(lengths: NDArray[np.int64]) -> Samples:
    """Room for sequences of `lengths`; everything but `starts` is to be filled."""
    starts = starts_of(lengths)
    total, count = int(starts[-1]), len(lengths)
    return Samples(
        input_ids=np.empty(total, dtype=np.int32),
        special_mask=np.empty(total, dtype=np.bool_),
        starts=starts,
        second_starts=np.empty(count, dtype=np.int64),
        is_random_next=np.empty(count, dtype=np.int8),
        keys=np.zeros((count, 3), dtype=np.uint64),
    )


def empty_examples(lengths: NDArray[np.int64], prediction_counts: NDArray[np.int64]) -> Examples:
    """Room for sequences of `lengths` with so many predictions; everything but the two `starts` is to be filled."""
    starts, prediction_starts = starts_of(lengths), starts_of(prediction_counts)
    return Examples(
        input_ids=np.empty(int(starts[-1]), dtype=np.int32),
        starts=starts,
        second_starts=np.empty(len(lengths), dtype=np.int64),
        is_random_next=np.empty(len(lengths), dtype=np.int8),
        prediction_positions=np.empty(int(prediction_starts[-1]), dtype=np.int32),
        prediction_labels=np.empty(int(prediction_starts[-1]), dtype=np.int32),
        prediction_starts=prediction_starts,
    )


def starts_of(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """[c + 1] 0 and the sums of `lengths` [c] up to each."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


@dataclass(slots=True)
class Batch:
    """One micro-batch of constant shape; every tensor int64 unless said otherwise."""

    input_ids: torch.Tensor
    """[b, s], pad id where empty."""
    token_type_ids: torch.Tensor
    """[b, s]"""
    position_ids: torch.Tensor
    """[b, s], 0-based, restarting in each packed sequence; 0 at padding."""
    sequence_ids: torch.Tensor
    """[b, s], 1..m for the sequences of a row, 0 at padding."""
    sequence_starts: torch.Tensor
    """[b, m + 1], first position of each sequence and of the padding; s where there is none."""
    prediction_positions: torch.Tensor
    """[b, p], 0 in empty slots."""
    cls_positions: torch.Tensor
    """[b, m], first position of each sequence, 0 in empty slots."""
    labels: dict[str, torch.Tensor]
    """By loss term: masked_lm [b, p], causal_lm [b, s], next_sentence [b, m]; IGNORE_LABEL in empty slots."""

    @property
    def fields(self) -> dict[str, torch.Tensor]:
        names = ("input_ids", "token_type_ids", "position_ids", "sequence_ids", "sequence_starts",
                 "prediction_positions", "cls_positions")
        return {n: getattr(self, n) for n in names} | {f"{term}_labels": x for term, x in self.labels.items()}
