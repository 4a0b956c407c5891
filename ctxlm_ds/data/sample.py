"""The values between a sample index and the model: Samples -> (objective) -> Examples -> (collate) -> Batch.

The sequences of a micro-batch are stored one after another in flat arrays, which compiled loops read: sequence i is
`input_ids[starts[i] : starts[i + 1]]`. An Example is one sequence.

Shape letters: c sequences of a micro-batch, t all their tokens, q all their predictions; n tokens of one sequence, k
its predictions; b rows of a micro-batch, s positions of a row, p prediction slots of a row, m sequences of a row (1
without packing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.fields import Field

if TYPE_CHECKING:
    import torch

Ids = NDArray[np.int32]
Places = NDArray[np.int64]
"""Positions, lengths or counts."""
Marks = NDArray[np.bool_]
Shares = NDArray[np.float64]
NO_LABEL = -1
NO_LANGUAGE = -1
DECODER = "decoder_"
"""Beginning of the names of a decoder's fields, if they are those of an encoder's too."""


@dataclass(frozen=True, slots=True)
class Example:
    """One input sequence after corruption."""

    input_ids: Ids  # [n]
    token_type_ids: Ids  # [n]
    prediction_positions: Ids  # [k], ascending
    prediction_labels: Ids  # [k], the original ids
    sequence_label: int


class Samples(NamedTuple):
    """The sequences of a micro-batch before corruption, special tokens in place.

    If the sample format is shifted, the last token of a sequence is not an input: the last input predicts it, and it
    may be another sequence's first.
    """

    input_ids: Ids  # [t]
    special_mask: Marks  # [t], True at a token that the sample format inserted (CLS, SEP, separators)
    starts: Places  # [c + 1]
    second_starts: Places  # [c], position in the sequence from which token types are 1, its length if none
    sequence_labels: NDArray[np.int8]  # [c], such as whether B follows A; NO_LABEL if the sample format has none
    keys: NDArray[np.uint64]  # [c, 3], the key of a sequence's random words: sample number, epoch, index
    continues_span: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
    # [t], 1 at a token of the given span of the token before it (dataset/reader.py); empty if no spans are given
    language_ids: Ids = np.empty(0, dtype=np.int32)
    # [c], the token of each sequence's language, or NO_LANGUAGE

    @property
    def lengths(self) -> Places:
        """Number of tokens [c] of each sequence."""
        return np.diff(self.starts)


class Examples(NamedTuple):
    """The sequences of a micro-batch after corruption (see Example)."""

    input_ids: Ids  # [t]
    starts: Places  # [c + 1]
    second_starts: Places  # [c], as in Samples
    sequence_labels: NDArray[np.int8]  # [c]
    prediction_positions: Ids  # [q], within the sequence, ascending in each
    prediction_labels: Ids  # [q]
    prediction_starts: Places  # [c + 1], sequence i has predictions starts[i] to starts[i + 1]

    def example(self, number: int) -> Example:
        begin, end = int(self.starts[number]), int(self.starts[number + 1])
        predictions = slice(int(self.prediction_starts[number]), int(self.prediction_starts[number + 1]))
        return Example(
            self.input_ids[begin:end],
            (np.arange(end - begin) >= self.second_starts[number]).astype(np.int32),
            self.prediction_positions[predictions],
            self.prediction_labels[predictions],
            int(self.sequence_labels[number]),
        )


@dataclass(frozen=True, slots=True)
class TargetExample:
    """One input sequence and the sequence that a decoder writes for it."""

    input_ids: Ids  # [n]
    target_ids: Ids  # [k]
    sequence_label: int = NO_LABEL

    @property
    def prediction_positions(self) -> range:
        """Places of the target."""
        return range(len(self.target_ids))


class TargetExamples(NamedTuple):
    """The inputs and targets of a micro-batch for an encoder-decoder (see TargetExample)."""

    input_ids: Ids  # [t]
    starts: Places  # [c + 1]
    target_ids: Ids  # [q]
    target_starts: Places  # [c + 1]
    replaced: Marks = np.empty(0, dtype=np.bool_)
    # [q], True at a token that the input lacks; empty if the objective does not say

    def example(self, number: int) -> TargetExample:
        inputs = slice(int(self.starts[number]), int(self.starts[number + 1]))
        targets = slice(int(self.target_starts[number]), int(self.target_starts[number + 1]))
        return TargetExample(self.input_ids[inputs], self.target_ids[targets])


def empty_samples(lengths: Places, with_spans: bool = False) -> Samples:
    """Allocate sequences of `lengths` without languages; `starts`, `keys` and `continues_span` (no span) are set."""
    starts = starts_of(lengths)
    total, count = int(starts[-1]), len(lengths)
    return Samples(
        input_ids=np.empty(total, dtype=np.int32),
        special_mask=np.empty(total, dtype=np.bool_),
        starts=starts,
        second_starts=np.empty(count, dtype=np.int64),
        sequence_labels=np.empty(count, dtype=np.int8),
        keys=np.zeros((count, 3), dtype=np.uint64),
        continues_span=np.zeros(total if with_spans else 0, dtype=np.uint8),
        language_ids=np.full(count, NO_LANGUAGE, dtype=np.int32),
    )


def starts_of(lengths: NDArray[np.integer]) -> Places:
    """Return [c + 1] 0 and the cumulative sums of `lengths` [c]."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


SEQUENCE_STARTS = "sequence_starts"


@dataclass(slots=True)
class Batch:
    """One micro-batch: tensors [b, columns] of constant shape by the name of their field.

    An objective declares the fields (objectives/base.Objective.fields). Several objectives have these, all int64:

        input_ids             [b, s], the padding token in empty places
        token_type_ids        [b, s]
        position_ids          [b, s], from 0 in each sequence of a row; 0 at padding
        sequence_ids          [b, s], 1..m for the sequences of a row, 0 at padding
        sequence_starts       [b, m + 1], first position of each sequence and of the padding; s if there is none
        prediction_positions  [b, p], 0 in empty slots
        cls_positions         [b, m], first position of each sequence, 0 in empty slots
        decoder_...           tokens, positions and sequences of a decoder's rows [b, t]
        ..._labels            IGNORE_LABEL if there is nothing to predict
    """

    fields: dict[str, torch.Tensor]
    places: int | None = None
    """Columns of sequence_starts that the rows need (`needed_places`); None: all."""

    @property
    def num_tokens(self) -> int:
        """Number of positions that are not padding."""
        return int(self.fields["sequence_ids"].count_nonzero())

    def narrowed(self) -> dict[str, torch.Tensor]:
        """Return the fields with the first `places` columns of sequence_starts.

        FlashAttention starts blocks of threads for each place of a sequence, also for an empty one.
        """
        starts = [name for name in self.fields if name.endswith(SEQUENCE_STARTS)]
        return self.fields | {name: self.fields[name][:, : self.places] for name in starts}

    @classmethod
    def example(cls, fields: Sequence[Field], rows: int, rng: np.random.Generator, vocab_size: int) -> Batch:
        """Make up rows of one full sequence each, for measurements and tests.

        Tokens are ids below `vocab_size`, every prediction slot is used, floats are between 0 and 1; labels are 0 or 1,
        which every vocabulary and every classifier has.
        """
        import torch

        def values(field: Field) -> NDArray[Any]:
            shape = (rows, field.columns)
            if field.dtype == "float32":
                return rng.random(shape, dtype=np.float32)
            name = field.name.removeprefix(DECODER)
            if name == "input_ids":
                return rng.integers(vocab_size, size=shape)
            if name == "position_ids":
                return np.tile(np.arange(field.columns), (rows, 1))
            if name == "sequence_ids":
                return np.ones(shape, dtype=np.int64)
            if name == "sequence_starts":
                return np.where(np.arange(field.columns) == 0, 0, np.full(shape, field.fill)).astype(np.int64)
            if name == "prediction_positions":
                length = next(other.columns for other in fields if other.name == "input_ids")
                return np.sort(np.argsort(rng.random((rows, length)), axis=1)[:, : field.columns], axis=1)
            if field.name.endswith("_labels"):
                return rng.integers(2, size=shape)
            return np.zeros(shape, dtype=np.int64)

        arrays = {field.name: values(field) for field in fields}
        return cls({name: torch.from_numpy(array) for name, array in arrays.items()}, needed_places(arrays))


def needed_places(arrays: Mapping[str, NDArray[Any]]) -> int | None:
    """Return the columns of sequence_starts that rows need, 1 more than a power of two; None without such a field."""
    starts = [name for name in arrays if name.endswith(SEQUENCE_STARTS)]
    lengths = {name: arrays[name.removesuffix("starts") + "ids"].shape[1] for name in starts}
    if not lengths:
        return None
    most = max(int((arrays[name] < length).sum(1).max()) for name, length in lengths.items())
    return 1 + (1 << max(most - 1, 0).bit_length())
