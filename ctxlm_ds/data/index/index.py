"""The sample index of one dataset: every sample and every row of one epoch, on disk, memory-mapped.

A folder PREFIX.samples-KEY, written by build.py, holds

    meta.json                          settings, counts, sizes and checksums of the files
    samples.npy                        one record per sample (record.SAMPLE_DTYPE)
    row_starts.npy, row_samples.npy    packed rows: row r has the samples row_samples[row_starts[r] : row_starts[r + 1]]
    masked_ids.npy                     with static masking the masked sequences, special tokens in place
    prediction_positions.npy           ascending positions of the predicted tokens (int32)
    prediction_labels.npy              their original ids
    masked_offsets.npy, prediction_offsets.npy    sample j has the items offsets[j] : offsets[j + 1]

BERT's paper masks once, before training, and duplicates the corpus ten times so that masks differ between epochs of
forty. With static masking num_duplicates passes are built, each sample is corrupted once under the key (seed, sample),
and training reads examples. Labels of sequences are those of samples.npy.

KEY is a hash of the dataset's and tokenizer's fingerprints and of every setting that changes the samples, so that an
index is never used for anything else. data/stream orders the rows, objectives corrupt the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.formats.base import SequenceTemplate
from ctxlm_ds.data.formats.loops.framing import INTACT, copy_tokens
from ctxlm_ds.data.index.storage import REMEDY, NpyAppender, open_array, read_meta
from ctxlm_ds.data.numba_random import compiled, stream_key
from ctxlm_ds.data.sample import Examples, Samples, empty_examples, empty_samples, starts_of
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.sections import DataSection
from ctxlm_ds.registry import FORMATS

if TYPE_CHECKING:
    from ctxlm_ds.data.formats.base import SampleFormat
    from ctxlm_ds.objectives.base import Objective

PURPOSE = "static_mask"
SAMPLES_AT_ONCE = 4096
LONGEST_SAMPLE = 1 << 16
PREDICTION_BYTES = 6
"""Least size of a stored prediction: its position and label."""


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type of stored token ids."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def write_masked_copies(
    directory: Path, reader: SampleReader, objective: Objective, data: DataSection, seed: int
) -> None:
    """Corrupt every sample once and write the five files."""
    ids, key = id_dtype(reader.vocab_size), stream_key(seed, PURPOSE)
    dtypes: tuple[Any, ...] = (ids, np.int64, np.int32, ids, np.int64)
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(NpyAppender(directory / f"{name}.npy", dtype))
            for name, dtype in zip(StoredCopies._fields, dtypes, strict=True)
        }
        for name in ("masked_offsets", "prediction_offsets"):
            files[name].append(np.zeros(1, dtype=np.int64))
        for begin in range(0, len(reader.records), SAMPLES_AT_ONCE):
            samples = reader.read(np.arange(begin, min(begin + SAMPLES_AT_ONCE, len(reader.records))))
            budgets = objective.budgets(samples.lengths, data)
            examples: Examples = objective.corrupt_batch(samples, key, budgets)
            files["masked_offsets"].append(files["masked_ids"].count + examples.starts[1:])
            files["masked_ids"].append(examples.input_ids)
            files["prediction_offsets"].append(files["prediction_labels"].count + examples.prediction_starts[1:])
            files["prediction_labels"].append(examples.prediction_labels)
            files["prediction_positions"].append(examples.prediction_positions)


class StoredCopies(NamedTuple):
    """The arrays of the five files with the examples of an index."""

    masked_ids: NDArray[Any]
    masked_offsets: NDArray[np.int64]
    prediction_positions: NDArray[np.int32]
    prediction_labels: NDArray[Any]
    prediction_offsets: NDArray[np.int64]


@compiled
def copy_examples(
    examples: Examples, slots: NDArray[np.int64], stored: StoredCopies, numbers: NDArray[np.int64], vocab_size: int
) -> int:
    """Copy stored sequences and predictions; return the place in `numbers` of the first damaged one, else INTACT."""
    for place in range(len(numbers)):
        number, slot = numbers[place], slots[place]
        begin, end = examples.starts[slot], examples.starts[slot + 1]
        first, after = examples.prediction_starts[slot], examples.prediction_starts[slot + 1]
        ids, labels = examples.input_ids[begin:end], examples.prediction_labels[first:after]
        positions = examples.prediction_positions[first:after]
        start, stop = stored.masked_offsets[number], stored.masked_offsets[number + 1]
        first, after = stored.prediction_offsets[number], stored.prediction_offsets[number + 1]
        if not (
            copy_tokens(ids, stored.masked_ids, start, stop, vocab_size)
            and copy_tokens(labels, stored.prediction_labels, first, after, vocab_size)
            and copy_tokens(positions, stored.prediction_positions, first, after, end - begin)
        ):
            return place
    return INTACT


class SampleReader:
    """Samples by number, framed by the sample format; every method raises DataError for a damaged index or dataset."""

    def __init__(
        self, records: NDArray[Any], dataset: IndexedDataset, template: SequenceTemplate, sample_format: SampleFormat
    ) -> None:
        self.records = records
        self.format = sample_format
        self._prefix = dataset.prefix
        self.vocab_size = template.vocab_size
        self._fill = sample_format.reader(dataset, template)
        self.has_spans = dataset.has_spans
        if self.has_spans:
            # A format copies ranges of tokens, so it copies their flags from the same ranges, 0 at special tokens.
            flags = template._replace(cls_id=0, sep_id=0, pad_id=0, vocab_size=2)
            self._fill_spans = sample_format.reader(dataset.with_tokens(dataset.continues_span), flags)

    def read(self, numbers: NDArray[np.int64]) -> Samples:
        """Return samples `numbers`, keyed by their number alone."""
        samples = empty_samples(self.lengths(numbers), self.has_spans)
        self.fill(samples, np.arange(len(numbers)), numbers)
        samples.keys[:, 0] = numbers
        return samples

    def lengths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the [c] tokens of samples `numbers` [c], including special ones and a token that is only a label."""
        self._require((numbers >= 0) & (numbers < len(self.records)), numbers)
        lengths = self.format.token_counts(self.records["num_tokens"][numbers].astype(np.int64))
        self._require((lengths > 0) & (lengths <= LONGEST_SAMPLE), numbers)
        return lengths

    def fill(self, samples: Samples, slots: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Write samples `numbers` [c] into the places `slots` [c] of `samples`, which have their lengths and keys."""
        damaged = self._fill(samples, slots, self.records, numbers)
        if damaged == INTACT and self.has_spans and len(samples.continues_span):
            flags = samples._replace(input_ids=samples.continues_span)  # type: ignore[arg-type]
            damaged = self._fill_spans(flags, slots, self.records, numbers)
        if damaged != INTACT:
            raise self._damaged(int(numbers[damaged]))

    def _require(self, is_valid: NDArray[np.bool_], numbers: NDArray[np.int64]) -> None:
        if not is_valid.all():
            raise self._damaged(int(numbers[is_valid.argmin()]))

    def _damaged(self, number: int) -> DataError:
        return DataError(
            f"{self._prefix}: sample {number} of its index does not fit the dataset, whose tokens are below "
            f"{self.vocab_size}; run ctxlm inspect --verify, delete the folder of the index and "
            "build it again (ctxlm samples)"
        )


class SampleIndex:
    """An open index; sample and row numbers count from 0."""

    def __init__(
        self, directory: Path, dataset: IndexedDataset, template: SequenceTemplate, key: str, language_id: int
    ) -> None:
        """Open the index with this SampleSettings.key; `language_id` is the token of its samples' language.

        Raises DataError if a file of the folder is missing or has another size, or the index has another key.
        """
        self.directory = directory
        self.dataset = dataset
        self.language_id = language_id
        self.meta: dict[str, Any] = read_meta(directory, key)
        settings = self.meta["settings"]
        self.is_static = settings["static_masking"] is not None
        self.is_packed = bool(settings["packing"])
        self.records = open_array(directory, "samples")
        self.random_key = int(self.meta["key"][:16], 16)
        """Distinguishes this index's samples from another's in the keys of their masks."""
        self.format: SampleFormat = FORMATS.get(settings["sample_format"])()
        self.reader = SampleReader(self.records, dataset, template, self.format)
        if self.is_static:
            self._stored = StoredCopies(*(open_array(directory, name) for name in StoredCopies._fields))
        if self.is_packed:
            self._most_sequences = int(settings["max_sequences_per_row"])
            self._row_starts = open_array(directory, "row_starts")
            self._row_samples = open_array(directory, "row_samples")

    def __len__(self) -> int:
        """Return the rows of one epoch."""
        return len(self._row_starts) - 1 if self.is_packed else len(self.records)

    def samples_of(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return [c] numbers of the samples in `rows` [b], row after row, and [b] how many each row has."""
        if not self.is_packed:
            return rows, np.ones(len(rows), dtype=np.int64)
        starts = self._row_starts[rows]
        counts = self._row_starts[rows + 1] - starts
        if len(rows) and not 0 <= int(counts.min()) <= int(counts.max()) <= self._most_sequences:
            raise DataError(f"{self.directory}: row_starts.npy is damaged; {REMEDY}")
        return self._row_samples[ranges(starts, counts)], counts

    def prediction_counts(self, numbers: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the [c] predictions of stored examples `numbers`, whose sequences have `lengths` [c]."""
        offsets = self._stored.prediction_offsets
        counts = offsets[numbers + 1] - offsets[numbers]
        wrong = np.flatnonzero((counts < 0) | (counts > lengths))
        if len(wrong):
            raise self._damaged_copy(int(numbers[wrong[0]]))
        return counts

    def fill_examples(self, examples: Examples, slots: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Write stored examples `numbers` [c] into the places `slots` [c] of `examples`, which has their lengths."""
        damaged = copy_examples(examples, slots, self._stored, numbers, self.reader.vocab_size)
        if damaged != INTACT:
            raise self._damaged_copy(int(numbers[damaged]))
        lengths = examples.starts[slots + 1] - examples.starts[slots]
        examples.second_starts[slots] = self.format.second_starts(self.records, numbers, lengths)
        examples.sequence_labels[slots] = self.records["is_random"][numbers]

    def _damaged_copy(self, number: int) -> DataError:
        return DataError(f"{self.directory}: the masked copy of sample {number} is damaged; {REMEDY}")


_Share = tuple[SampleIndex, NDArray[np.int64], NDArray[np.int64]]
"""An index, [c] places among a micro-batch's sequences, and [c] numbers of the index's samples at these places."""


class RowSource:
    """The rows of several indexes, one after another; reading raises DataError for a damaged index or dataset."""

    def __init__(self, indexes: Sequence[SampleIndex]) -> None:
        self.indexes = list(indexes)
        self._starts = starts_of(np.array([len(index) for index in indexes], dtype=np.int64))
        self.is_static = bool(self.indexes) and self.indexes[0].is_static
        """All rows are finished examples (static masking); otherwise none is."""

    def __len__(self) -> int:
        return int(self._starts[-1])

    def sources(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return [b] number of the index that holds each of `rows` [b], and [b] the row's number there; -1 for -1."""
        sources = self._starts.searchsorted(rows, side="right") - 1
        return sources, np.where(sources < 0, -1, rows - self._starts[sources])

    def samples(self, rows: NDArray[np.int64], epochs: NDArray[np.int64]) -> tuple[Samples, NDArray[np.int64]]:
        """Return the samples of `rows` [b] (-1: none), keyed for `epochs` [b], and [b + 1] where each row's begin."""
        shares, lengths, row_starts = self._shares(rows)
        samples = empty_samples(lengths, any(index.reader.has_spans for index in self.indexes))
        samples.keys[:, 1] = np.repeat(epochs, np.diff(row_starts))
        for index, slots, numbers in shares:
            samples.keys[slots, 0] = numbers
            samples.keys[slots, 2] = index.random_key
            samples.language_ids[slots] = index.language_id
            index.reader.fill(samples, slots, numbers)
        return samples, row_starts

    def examples(self, rows: NDArray[np.int64]) -> tuple[Examples, NDArray[np.int64]]:
        """Return the stored examples of `rows` [b] (-1: none), and [b + 1] where each row's begin."""
        shares, lengths, row_starts = self._shares(rows)
        prediction_counts = np.empty(len(lengths), dtype=np.int64)
        for index, slots, numbers in shares:
            prediction_counts[slots] = index.prediction_counts(numbers, lengths[slots])
        examples = empty_examples(lengths, prediction_counts)
        for index, slots, numbers in shares:
            index.fill_examples(examples, slots, numbers)
        return examples, row_starts

    def _shares(self, rows: NDArray[np.int64]) -> tuple[list[_Share], NDArray[np.int64], NDArray[np.int64]]:
        """Return the samples of each index in `rows` [b], [c] their lengths, and [b + 1] first sequence of each row."""
        counts = np.zeros(len(rows), dtype=np.int64)
        sources, row_numbers = self.sources(rows)
        found = []
        for source in sorted(set(sources.tolist()) - {-1}):
            places = np.flatnonzero(sources == source)
            numbers, counts[places] = self.indexes[source].samples_of(row_numbers[places])
            found.append((self.indexes[source], places, numbers))
        row_starts = starts_of(counts)
        lengths = np.empty(int(row_starts[-1]), dtype=np.int64)
        shares = []
        for index, places, numbers in found:
            slots = ranges(row_starts[places], counts[places])
            lengths[slots] = index.reader.lengths(numbers)
            shares.append((index, slots, numbers))
        return shares, lengths, row_starts


def ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return starts[0], starts[0] + 1, ... (counts[0] numbers), then those of the next range."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - ends + counts, counts) + np.arange(total)
