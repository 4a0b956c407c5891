"""Building the sample index of a dataset (index.py says what it holds).

In: an indexed dataset, a tokenizer, a recipe, and the objective if static masking stores its work. Out: the folder,
which appears whole; several processes may build the same one at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.fields import Objective
from ctxlm_ds.data.formats.base import Making, SequenceTemplate
from ctxlm_ds.data.formats.loops.packing import pack_samples
from ctxlm_ds.data.index.index import RowSource, SampleIndex
from ctxlm_ds.data.index.location import IndexPlace
from ctxlm_ds.data.index.reader import SampleReader
from ctxlm_ds.data.index.record import INDEX_VERSION, SAMPLE_DTYPE, SampleSettings, Source
from ctxlm_ds.data.index.static import write_masked_copies
from ctxlm_ds.data.index.storage import NpyAppender, build_once, open_array, verify_files, write_meta
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FORMATS

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer

INDEX_FORMAT = "ctxlm_ds-samples"


def build_rows(
    parts: Sequence[Source],
    tokenizer: Tokenizer,
    config: RunConfig,
    objective: Objective | None = None,
    held_out: bool = False,
    workers: int | None = None,
    verify: bool = True,
) -> RowSource:
    """Build the missing indexes of sources and open them all as one row space (see build_sample_index)."""
    return RowSource(
        [build_sample_index(part, tokenizer, config, objective, held_out, workers, verify) for part in parts]
    )


def build_sample_index(
    part: Source,
    tokenizer: Tokenizer,
    config: RunConfig,
    objective: Objective | None = None,
    held_out: bool = False,
    workers: int | None = None,
    verify: bool = True,
) -> SampleIndex:
    """Open a source's sample index, building it first if it does not exist.

    Args:
        part: a dataset, without .bin/.idx, or some of its documents.
        objective: needed for static masking only.
        held_out: a validation set: fixed seed, one pass, masks never stored.
        workers: threads; by default the processor cores that this process may use. The files do not depend on it.
        verify: compare the checksums of an index that this process has not built itself.

    Raises:
        DataError: the dataset does not fit the tokenizer or the sample format, the index is damaged, or the disk
            refuses it.
        ConfigError: seq_length is too short for the sample format, or static masking without an objective.
    """
    place = IndexPlace.of(part, tokenizer, config, held_out)

    def fill(folder: Path) -> None:
        counts = _write_samples(folder, place, tokenizer, workers or usable_cores())
        if place.settings.static_masking is not None:
            _write_copies(folder, place.dataset, tokenizer, config, objective)
        write_meta(folder, _meta(place) | counts)

    is_own = build_once(place.directory, fill)
    index = place.open(tokenizer)
    if verify and not is_own:
        verify_files(index.directory, index.meta)
    return index


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _meta(place: IndexPlace) -> dict[str, Any]:
    return {
        "format": INDEX_FORMAT,
        "version": INDEX_VERSION,
        "key": place.key,
        "settings": place.settings.to_dict(),
        "dataset": {
            "prefix": place.dataset.prefix,
            "fingerprint": place.dataset.fingerprint,
            "documents": list(place.documents),
        },
    }


def _write_samples(directory: Path, place: IndexPlace, tokenizer: Tokenizer, workers: int) -> dict[str, int]:
    """Write samples.npy and, if samples share rows, the rows; return what was made, in numbers."""
    settings = place.settings
    sample_format = FORMATS.get(settings.sample_format)()
    template = SequenceTemplate.of(tokenizer)
    made = sample_format.make(Making(place.dataset, place.documents, settings, template, workers))
    forms_rows = sample_format.forms_rows and settings.packing
    num_tokens = 0
    with (
        NpyAppender(directory / "samples.npy", SAMPLE_DTYPE) as file,
        _rows_files(directory) if forms_rows else nullcontext() as rows,
    ):
        for records, counts in made.pieces:
            if rows is not None:
                rows.append(np.arange(file.count, file.count + len(records)), counts)
            file.append(records)
            num_tokens += int(records["num_tokens"].sum(dtype=np.int64))
    num_rows = file.count
    if settings.packing:
        num_rows = rows.num_rows if rows is not None else _write_rows(directory, settings, workers)
    return {
        "documents": made.documents,
        "sentences": made.sentences,
        "samples": file.count,
        "rows": num_rows,
        "tokens": num_tokens,
    }


class _RowsFiles:
    """row_starts.npy and row_samples.npy, growing."""

    def __init__(self, starts: NpyAppender, samples: NpyAppender) -> None:
        self._starts, self._samples = starts, samples
        self._last = 0
        starts.append(np.zeros(1, dtype=np.int64))

    def append(self, numbers: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """[n] sample ids, row after row, and [r] how many samples each row that ends has."""
        ends = self._last + np.cumsum(counts)
        self._last = int(ends[-1]) if len(ends) else self._last
        self._starts.append(ends)
        self._samples.append(numbers)

    @property
    def num_rows(self) -> int:
        return self._starts.count - 1


@contextmanager
def _rows_files(directory: Path) -> Iterator[_RowsFiles]:
    with (
        NpyAppender(directory / "row_starts.npy", np.int64) as starts,
        NpyAppender(directory / "row_samples.npy", np.int64) as samples,
    ):
        yield _RowsFiles(starts, samples)


def _write_rows(directory: Path, settings: SampleSettings, workers: int) -> int:
    """Pack the samples and return the number of rows."""
    lengths = open_array(directory, "samples")["num_tokens"]
    with _rows_files(directory) as rows:
        for numbers, counts in pack_samples(
            lengths, settings.seq_length, settings.max_sequences_per_row, settings.seed, workers
        ):
            rows.append(numbers, counts)
        return rows.num_rows


def _write_copies(
    directory: Path, dataset: IndexedDataset, tokenizer: Tokenizer, config: RunConfig, objective: Objective | None
) -> None:
    """Write the masked copies of static masking."""
    if objective is None:
        raise ConfigError("objective.masking is static: building the sample index needs the objective, none was given")
    records = open_array(directory, "samples")
    sample_format = FORMATS.get(config.data.sample_format)()
    reader = SampleReader(records, dataset, SequenceTemplate.of(tokenizer), sample_format)
    write_masked_copies(
        directory,
        reader,
        objective,
        lambda lengths: objective.budgets(lengths, config.data),
        tokenizer.vocab_size,
        config.training.seed,
    )
