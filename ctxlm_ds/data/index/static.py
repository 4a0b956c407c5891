"""Static masking: the masked copies of all samples, written when the index is built.

BERT's paper masks once, before training, and duplicates the corpus ten times so that masks differ between epochs of
forty. Here num_duplicates passes are built, each sample is corrupted once under the key (seed, sample), and training
reads examples. Files next to samples.npy, all memory-mapped, sample j being the slices offsets[j]:offsets[j + 1]:

    masked_ids.npy             the sequences, special tokens in place (uint16, or int32 for large vocabularies)
    masked_offsets.npy         [samples + 1] int64
    prediction_positions.npy   ascending positions of the predicted tokens (int32)
    prediction_labels.npy      their original ids
    prediction_offsets.npy     [samples + 1] int64

The label of a sequence is samples.npy's; token types follow from the lengths of A and B there.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.formats.loops.framing import INTACT, copy_tokens
from ctxlm_ds.data.index.storage import REMEDY, NpyAppender, open_array
from ctxlm_ds.data.numba_random import compiled, stream_key
from ctxlm_ds.data.sample import Examples
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.sections import DataSection

if TYPE_CHECKING:
    from ctxlm_ds.data.index.index import SampleReader
    from ctxlm_ds.objectives.base import Objective

PURPOSE = "static_mask"
SAMPLES_AT_ONCE = 4096
UINT16_VOCABULARY = 65_536
PREDICTION_BYTES = 6
"""Least size of a stored prediction: its position and label."""


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type of stored token ids."""
    return np.dtype(np.uint16 if vocab_size <= UINT16_VOCABULARY else np.int32)


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
    """The arrays of the five files."""

    masked_ids: NDArray[Any]
    masked_offsets: NDArray[np.int64]
    prediction_positions: NDArray[np.int32]
    prediction_labels: NDArray[Any]
    prediction_offsets: NDArray[np.int64]


class MaskedCopies:
    """The stored examples of an index; reading raises DataError if the files are damaged."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._stored = StoredCopies(*(open_array(directory, name) for name in StoredCopies._fields))

    def prediction_counts(self, numbers: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the [c] predictions of examples `numbers`, whose sequences have `lengths` [c]."""
        offsets = self._stored.prediction_offsets
        counts = offsets[numbers + 1] - offsets[numbers]
        wrong = np.flatnonzero((counts < 0) | (counts > lengths))
        if len(wrong):
            raise self._damaged(int(numbers[wrong[0]]))
        return counts

    def fill(self, examples: Examples, slots: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Write examples `numbers` [c] into the places `slots` [c] of `examples`, which has their lengths.

        Second starts and labels of sequences are not stored here.
        """
        damaged = copy_examples(examples, slots, self._stored, numbers, self._vocab_size)
        if damaged != INTACT:
            raise self._damaged(int(numbers[damaged]))

    def _damaged(self, number: int) -> DataError:
        return DataError(f"{self._directory}: the masked copy of sample {number} is damaged; {REMEDY}")


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
