"""The sample index of one dataset: every sample and every row of one epoch, on disk, memory-mapped.

In: a folder PREFIX.samples-KEY (or below data.sample_index_dir), written by build.py, with

    meta.json                          settings, counts, sizes of the files
    samples.npy                        one record a sample (record.SAMPLE_DTYPE)
    row_starts.npy, row_samples.npy    packed rows: row r has the samples row_samples[row_starts[r] : row_starts[r + 1]]
    masked_*.npy, prediction_*.npy     with static masking (static.py)

KEY is a hash of the dataset's and tokenizer's fingerprints and of every setting that changes the samples, so that an
index is never used for anything else. Out: rows of samples. Not here: the order of rows (sampler), corruption
(objectives).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.config.schema import RunConfig
from ctxlm_ds.data.indexed import IndexedDataset
from ctxlm_ds.data.sample import NO_LABEL, Example, Sample
from ctxlm_ds.data.samples.reader import SampleReader
from ctxlm_ds.data.samples.record import SampleSettings, sample_settings
from ctxlm_ds.data.samples.static import MaskedCopies
from ctxlm_ds.data.samples.storage import META_NAME, open_array, read_meta
from ctxlm_ds.data.samples.template import SequenceTemplate
from ctxlm_ds.errors import DataError

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer

BUILD_COMMAND = "tools/build_samples.py --config RECIPE.yaml"


class SampleIndex:
    """An open index; sample and row numbers count from 0.

    Raises:
        DataError: a file of the folder is missing or damaged.
    """

    def __init__(self, directory: Path, dataset: IndexedDataset, template: SequenceTemplate) -> None:
        self.directory = directory
        self.meta: dict[str, Any] = read_meta(directory)
        settings = self.meta["settings"]
        self.is_static = settings["static_masking"] is not None
        self.is_packed = bool(settings["packing"])
        self.template = template
        self.records = open_array(directory, "samples")
        self.random_key = int(self.meta["key"][:16], 16)
        """Distinguishes this index's samples from another's in the keys of their masks."""
        self._reader = SampleReader(self.records, dataset, template, settings["sample_format"])
        self._copies = MaskedCopies(directory) if self.is_static else None
        if self.is_packed:
            self._row_starts = open_array(directory, "row_starts")
            self._row_samples = open_array(directory, "row_samples")

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self._row_starts) - 1 if self.is_packed else len(self.records)

    @property
    def num_samples(self) -> int:
        return len(self.records)

    def row_samples(self, row: int) -> list[int]:
        """Numbers of the samples in a row."""
        if not self.is_packed:
            return [row]
        numbers: list[int] = self._row_samples[self._row_starts[row] : self._row_starts[row + 1]].tolist()
        return numbers

    def row(self, row: int) -> list[Sample] | list[Example]:
        """A row's samples; with static masking its finished examples."""
        numbers = self.row_samples(row)
        if self._copies is not None:
            return [self.example(number) for number in numbers]
        return [self.sample(number) for number in numbers]

    def sample(self, number: int) -> Sample:
        """Sample `number` before corruption."""
        return self._reader.sample(number)

    def example(self, number: int) -> Example:
        """Stored example `number` (static masking only)."""
        assert self._copies is not None, "only an index with static masking stores examples"
        is_random = int(self.records[number]["is_random"])
        return self._copies.example(number, self._reader.second_start(number), is_random)


class RowSource:
    """The rows of several indexes, one after another, as one row space."""

    def __init__(self, indexes: Sequence[SampleIndex]) -> None:
        self.indexes = list(indexes)
        self._ends = np.cumsum([len(index) for index in indexes]).tolist()
        self.pad_id = self.indexes[0].template.pad_id if self.indexes else 0

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends else 0

    def locate(self, row: int) -> tuple[SampleIndex, int]:
        """The index that holds a row, and the row's number there."""
        number = bisect_right(self._ends, row)
        return self.indexes[number], row - (self._ends[number - 1] if number else 0)


def open_rows(
    prefixes: Sequence[str | Path], tokenizer: Tokenizer, config: RunConfig, held_out: bool = False
) -> RowSource:
    """Open the indexes of datasets, which must have been built, as one row space.

    Raises:
        DataError: an index is missing or damaged, a dataset does not fit the tokenizer, or there is no row at all.
    """
    if not prefixes:
        raise DataError("no dataset is named; set data.train to one or more prefixes made by tools/preprocess_data.py")
    return RowSource([open_sample_index(prefix, tokenizer, config, held_out) for prefix in prefixes])


def open_sample_index(
    prefix: str | Path, tokenizer: Tokenizer, config: RunConfig, held_out: bool = False
) -> SampleIndex:
    """Open the index of one dataset that `build_sample_index` has built, here or in another process.

    Raises:
        DataError: it does not exist or is damaged, or the dataset does not fit the tokenizer.
    """
    dataset = open_dataset(prefix, tokenizer)
    directory, _ = index_place(dataset, tokenizer, sample_settings(config, held_out), config.data.sample_index_dir)
    if not (directory / META_NAME).exists():
        raise DataError(f"{directory}: no sample index for this recipe; build it with {BUILD_COMMAND}")
    return SampleIndex(directory, dataset, SequenceTemplate.of(tokenizer))


def open_dataset(prefix: str | Path, tokenizer: Tokenizer) -> IndexedDataset:
    """Open a dataset, refusing one that another tokenizer made (Megatron's carry no fingerprint to compare)."""
    dataset = IndexedDataset(prefix)
    made_with = (dataset.metadata or {}).get("tokenizer_fingerprint")
    if made_with is not None and made_with != tokenizer.fingerprint:
        raise DataError(
            f"{prefix}: made with another tokenizer (fingerprint {made_with[:12]}, the recipe's is "
            f"{tokenizer.fingerprint[:12]}); set tokenizer.path to that one, or run tools/preprocess_data.py again"
        )
    return dataset


def index_place(
    dataset: IndexedDataset, tokenizer: Tokenizer, settings: SampleSettings, parent: str | None
) -> tuple[Path, str]:
    """The folder of a dataset's index, and its full key."""
    key = settings.key(dataset.fingerprint, tokenizer.fingerprint)
    prefix = Path(dataset.prefix)
    return (Path(parent) if parent else prefix.parent) / f"{prefix.name}.samples-{key[:12]}", key


def next_sentence_share(index: SampleIndex) -> float | None:
    """Share of pairs in which B truly follows A; None where the format has no such label."""
    labels: NDArray[np.int8] = index.records["is_random"]
    return None if len(labels) == 0 or labels[0] == NO_LABEL else float((labels == 0).mean())
