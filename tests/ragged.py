"""Sequences one by one, as tests write them down, to and from the flat arrays of data/sample.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.sample import NO_LABEL, NO_LANGUAGE, Batch, Example, Examples, Samples, starts_of
from ctxlm_ds.data.stream.collate import collate_arrays, to_batches
from ctxlm_ds.objectives.base import Objective
from ctxlm_ds.objectives.causal_lm import CausalLM, CausalLMSection

CLS, SEP = 2, 3
KEY = np.uint64(7)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence of Samples."""

    input_ids: NDArray[np.int32]
    token_type_ids: NDArray[np.int32]
    special_mask: NDArray[np.bool_]
    sequence_label: int


def one_sample(samples: Samples, number: int) -> Sample:
    """Sequence `number`; types are 0 for [CLS] A [SEP], 1 for B [SEP]."""
    own = slice(samples.starts[number], samples.starts[number + 1])
    types = (np.arange(own.stop - own.start) >= samples.second_starts[number]).astype(np.int32)
    return Sample(samples.input_ids[own], types, samples.special_mask[own], int(samples.sequence_labels[number]))


def pair_sample(first: NDArray[np.integer], second: NDArray[np.integer], is_random: int = 0) -> Sample:
    """[CLS] A [SEP] B [SEP]."""
    ids = np.concatenate([[CLS], first, [SEP], second, [SEP]]).astype(np.int32)
    types = np.repeat([0, 1], [len(first) + 2, len(second) + 1]).astype(np.int32)
    special = np.zeros(len(ids), dtype=np.bool_)
    special[[0, len(first) + 1, len(ids) - 1]] = True
    return Sample(ids, types, special, is_random)


def single_sample(text: NDArray[np.integer]) -> Sample:
    """[CLS] text [SEP]."""
    ids = np.concatenate([[CLS], text, [SEP]]).astype(np.int32)
    special = np.zeros(len(ids), dtype=np.bool_)
    special[[0, len(ids) - 1]] = True
    return Sample(ids, np.zeros(len(ids), dtype=np.int32), special, NO_LABEL)


def samples_from(samples: Sequence[Sample], keys: Sequence[tuple[int, int, int]] | None = None) -> Samples:
    """Samples laid together; keyed by their place, epoch 0 and index 0 unless `keys` are given."""
    lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
    return Samples(
        np.concatenate([sample.input_ids for sample in samples]).astype(np.int32),
        np.concatenate([sample.special_mask for sample in samples]),
        starts_of(lengths),
        np.array([len(sample.input_ids) - sample.token_type_ids.sum() for sample in samples], dtype=np.int64),
        np.array([sample.sequence_label for sample in samples], dtype=np.int8),
        np.array(keys or [(number, 0, 0) for number in range(len(samples))], dtype=np.uint64),
        language_ids=np.full(len(samples), NO_LANGUAGE, dtype=np.int32),
    )


def examples_from(examples: Sequence[Example]) -> Examples:
    """Examples laid together."""

    def joined(arrays: Sequence[NDArray[np.integer]]) -> NDArray[np.int32]:
        return np.concatenate([*arrays, np.empty(0)]).astype(np.int32)

    return Examples(
        joined([example.input_ids for example in examples]),
        starts_of(np.array([len(example.input_ids) for example in examples], dtype=np.int64)),
        np.array([len(example.input_ids) - example.token_type_ids.sum() for example in examples], dtype=np.int64),
        np.array([example.sequence_label for example in examples], dtype=np.int8),
        joined([example.prediction_positions for example in examples]),
        joined([example.prediction_labels for example in examples]),
        starts_of(np.array([len(example.prediction_positions) for example in examples], dtype=np.int64)),
    )


def each(examples: Any) -> list[Any]:
    """Examples of any kind one by one."""
    return [examples.example(number) for number in range(len(examples.starts) - 1)]


def text_examples(texts: Sequence[NDArray[np.integer]]) -> list[Example]:
    """Pieces of text as causal_lm's examples, each one token shorter."""
    none = [np.zeros(len(text), dtype=np.bool_) for text in texts]
    samples = [Sample(text, np.zeros(len(text)), mask, NO_LABEL) for text, mask in zip(texts, none, strict=True)]
    return each(CausalLM(CausalLMSection()).corrupt_batch(samples_from(samples), KEY, np.full(len(texts), 1 << 16)))


@dataclass
class Rows:
    """What an objective asks of a data section."""

    seq_length: int
    sequences_per_row: int = 1

    @property
    def shares_rows(self) -> bool:
        return self.sequences_per_row > 1


def collate(rows: Sequence[Sequence[Example]], objective: Objective, shape: Rows) -> Batch:
    """Rows of examples as one Batch [b = len(rows), ...]."""
    row_starts = starts_of(np.array([len(row) for row in rows], dtype=np.int64))
    examples = examples_from([example for row in rows for example in row])
    fields = objective.fields(shape)
    (batch,) = to_batches(collate_arrays(objective, fields, examples, row_starts), fields, len(rows))
    return batch
