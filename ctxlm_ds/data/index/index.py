"""The sample index of one dataset: every sample and every row of one epoch, on disk, memory-mapped.

A folder PREFIX.samples-KEY, written by build.py, holds

    meta.json                          settings, counts, sizes and checksums of the files
    samples.npy                        one record per sample (record.SAMPLE_DTYPE)
    row_starts.npy, row_samples.npy    packed rows: row r has the samples row_samples[row_starts[r] : row_starts[r + 1]]

BERT's paper masks once, before training, and duplicates the corpus ten times so that masks differ between epochs of
forty. With static masking num_duplicates passes are built, and the key of a sample's masks has neither epoch nor index.

KEY is a hash of the dataset's and tokenizer's fingerprints and of every setting that changes the samples, so that an
index is never used for anything else. data/stream orders the rows, objectives corrupt the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.formats.base import SampleFormat, SequenceTemplate
from ctxlm_ds.data.formats.loops.framing import INTACT
from ctxlm_ds.data.index.storage import REMEDY, open_array, read_meta
from ctxlm_ds.data.sample import Samples, empty_samples, starts_of
from ctxlm_ds.errors import DataError
from ctxlm_ds.registry import FORMATS

LONGEST_SAMPLE = 1 << 23
"""More than a sample of the longest rows has."""


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
        self.random_key = 0 if self.is_static else int(self.meta["key"][:16], 16)
        """Distinguishes this index's samples from another's in the keys of their masks, unless masks are static."""
        self.format: SampleFormat = FORMATS.get(settings["sample_format"])()
        self.reader = SampleReader(self.records, dataset, template, self.format)
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


_Share = tuple[SampleIndex, NDArray[np.int64], NDArray[np.int64]]
"""An index, [c] places among a micro-batch's sequences, and [c] numbers of the index's samples at these places."""


class RowSource:
    """The rows of several indexes, one after another; reading raises DataError for a damaged index or dataset."""

    def __init__(self, indexes: Sequence[SampleIndex]) -> None:
        self.indexes = list(indexes)
        self._starts = starts_of(np.array([len(index) for index in indexes], dtype=np.int64))
        self.is_static = bool(self.indexes) and self.indexes[0].is_static
        """Samples have the same masks in every epoch."""

    def __len__(self) -> int:
        return int(self._starts[-1])

    def sources(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return [b] number of the index that holds each of `rows` [b], and [b] the row's number there; -1 for -1."""
        sources = self._starts.searchsorted(rows, side="right") - 1
        return sources, np.where(sources < 0, -1, rows - self._starts[sources])

    def samples(self, rows: NDArray[np.int64], epochs: NDArray[np.int64]) -> tuple[Samples, NDArray[np.int64]]:
        """Return the samples of `rows` [b] (-1: none), keyed for `epochs` [b], and [b + 1] where each row's begin.

        With static masks the key is the number of the sample alone.
        """
        shares, lengths, row_starts = self._shares(rows)
        samples = empty_samples(lengths, any(index.reader.has_spans for index in self.indexes))
        samples.keys[:, 1] = 0 if self.is_static else np.repeat(epochs, np.diff(row_starts))
        for index, slots, numbers in shares:
            samples.keys[slots, 0] = numbers
            samples.keys[slots, 2] = index.random_key
            samples.language_ids[slots] = index.language_id
            index.reader.fill(samples, slots, numbers)
        return samples, row_starts

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
