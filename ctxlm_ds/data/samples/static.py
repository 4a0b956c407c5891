"""Static masking: the masked copies themselves as an indexed binary data set, written when the index is built.

BERT's paper masks once, before training, and duplicates the corpus ten times so that masks differ between epochs of
forty. Here num_duplicates passes are built, each sample is corrupted once under the key (seed, sample), and training
reads examples. Files beside samples.npy, all memory-mapped, sample j being the slices offsets[j]:offsets[j + 1]:

    masked_ids.npy             the sequences, special tokens in place (uint16, or int32 for large vocabularies)
    masked_offsets.npy         [samples + 1] int64
    prediction_positions.npy   ascending positions of the predicted tokens (int32)
    prediction_labels.npy      their original ids
    prediction_offsets.npy     [samples + 1] int64

The next-sentence label is samples.npy's; token types follow from the lengths of A and B there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.collate import Objective
from ctxlm_ds.data.randomness import KeyedStreams, SampleDraws
from ctxlm_ds.data.sample import Example
from ctxlm_ds.data.samples.reader import SampleReader
from ctxlm_ds.data.samples.storage import NpyAppender, open_array

PURPOSE = "static_mask"
SAMPLES_AT_ONCE = 256
UINT16_VOCABULARY = 65_536


def write_masked_copies(
    directory: Path,
    reader: SampleReader,
    objective: Objective,
    budgets: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    vocab_size: int,
    seed: int,
) -> None:
    """Corrupt every sample once and write the five files; `budgets` gives the most predictions by length."""
    id_dtype = np.uint16 if vocab_size <= UINT16_VOCABULARY else np.int32
    dtypes: dict[str, Any] = {
        "masked_ids": id_dtype, "masked_offsets": np.int64, "prediction_positions": np.int32,
        "prediction_labels": id_dtype, "prediction_offsets": np.int64,
    }
    streams = KeyedStreams(seed, PURPOSE)
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(NpyAppender(directory / f"{name}.npy", dtype)) for name, dtype in dtypes.items()
        }
        files["masked_offsets"].append(np.zeros(1, dtype=np.int64))
        files["prediction_offsets"].append(np.zeros(1, dtype=np.int64))
        for begin in range(0, len(reader.records), SAMPLES_AT_ONCE):
            numbers = range(begin, min(begin + SAMPLES_AT_ONCE, len(reader.records)))
            samples = [reader.sample(number) for number in numbers]
            lengths = np.array([len(sample.input_ids) for sample in samples])
            draws = SampleDraws(streams, [(number, 0, 0) for number in numbers])
            _append_examples(files, objective.corrupt_batch(samples, draws, budgets(lengths)))


def _append_examples(files: dict[str, NpyAppender], examples: Sequence[Example]) -> None:
    for name, values in (
        ("masked", [example.input_ids for example in examples]),
        ("prediction", [example.prediction_labels for example in examples]),
    ):
        data = files["masked_ids" if name == "masked" else "prediction_labels"]
        offsets = data.count + np.cumsum([len(value) for value in values])
        data.append(np.concatenate(values))
        files[f"{name}_offsets"].append(offsets)
    files["prediction_positions"].append(np.concatenate([example.prediction_positions for example in examples]))


class MaskedCopies:
    """The stored examples of an index."""

    def __init__(self, directory: Path) -> None:
        self._ids = open_array(directory, "masked_ids")
        self._offsets = open_array(directory, "masked_offsets")
        self._positions = open_array(directory, "prediction_positions")
        self._labels = open_array(directory, "prediction_labels")
        self._prediction_offsets = open_array(directory, "prediction_offsets")

    def example(self, number: int, second_start: int, is_random_next: int) -> Example:
        """Example `number`; token types are 1 from position `second_start` on."""
        ids = self._ids[self._offsets[number] : self._offsets[number + 1]].astype(np.int64)
        predictions = slice(self._prediction_offsets[number], self._prediction_offsets[number + 1])
        types = np.zeros(len(ids), dtype=np.int64)
        types[second_start:] = 1
        positions, labels = self._positions[predictions], self._labels[predictions]
        return Example(ids, types, positions.astype(np.int64), labels.astype(np.int64), is_random_next)
