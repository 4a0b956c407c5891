"""Examples to micro-batches of one constant shape (DESIGN decision 3).

In: rows, each a list of examples (several where rows are packed, none for an empty row). Out: one flat int32 array,
which is what a loader worker sends to the training process (one pickle, no shared memory), and the Batch of int64
tensors made of it. Not here: corruption (the objective's, injected through the protocol below), the order of rows
(sampler).

Shape letters as in sample.py: b rows, s positions, p prediction slots, m sequences of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.config.schema import DataConfig, ObjectiveConfig
from ctxlm_ds.data.randomness import SampleDraws
from ctxlm_ds.data.sample import IGNORE_LABEL, NO_LABEL, Batch, Example, Sample
from ctxlm_ds.errors import ConfigError

MASKED_LM = "masked_lm"
CAUSAL_LM = "causal_lm"
NEXT_SENTENCE = "next_sentence"


class Objective(Protocol):
    """What the data needs of an objective: the corruption of samples and the names of its loss terms."""

    @property
    def terms(self) -> tuple[str, ...]: ...

    def corrupt_batch(self, samples: Sequence[Sample], draws: SampleDraws, budgets: NDArray[np.int64]) -> list[Example]:
        """Corrupt samples with the random words of each, at most budgets[i] predictions in sample i."""
        ...


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The constant shape of every micro-batch of a run, and what fills its empty places."""

    seq_length: int
    prediction_slots: int
    sequences_per_row: int
    pad_id: int
    terms: tuple[str, ...]

    def fields(self) -> dict[str, int]:
        """Numbers a row by field, in the order in which they lie in the flat array."""
        columns = {
            "input_ids": self.seq_length,
            "token_type_ids": self.seq_length,
            "position_ids": self.seq_length,
            "sequence_ids": self.seq_length,
            "sequence_starts": self.sequences_per_row + 1,
            "prediction_positions": self.prediction_slots,
            "cls_positions": self.sequences_per_row,
        }
        label_columns = {
            MASKED_LM: self.prediction_slots, CAUSAL_LM: self.seq_length, NEXT_SENTENCE: self.sequences_per_row
        }
        return columns | {f"labels.{term}": label_columns[term] for term in self.terms}


def batch_shape(data: DataConfig, objective: ObjectiveConfig, terms: tuple[str, ...], pad_id: int) -> BatchShape:
    """The shape that a recipe's micro-batches have.

    Raises:
        ConfigError: packed rows have fewer prediction slots than sequences.
    """
    sequences = data.sequences_per_row
    slots = prediction_slots(data, objective)
    if slots < sequences and objective.name != CAUSAL_LM:
        raise ConfigError(
            f"objective.max_predictions {slots} is less than data.max_sequences_per_row {sequences}; "
            "every packed sequence needs at least one prediction slot: raise the first or lower the second"
        )
    return BatchShape(data.seq_length, slots, sequences, pad_id, terms)


def prediction_slots(data: DataConfig, objective: ObjectiveConfig) -> int:
    """Prediction slots of a row: the setting, or what no row can exceed (each sequence rounds up by less than one).

    causal_lm predicts at every position.
    """
    if objective.name == CAUSAL_LM:
        return data.seq_length
    if objective.max_predictions is not None:
        return objective.max_predictions
    return _slots_needed(data, objective)


def _slots_needed(data: DataConfig, objective: ObjectiveConfig) -> int:
    sequences = data.max_sequences_per_row if data.packing else 1
    return max(1, math.ceil(objective.mask_prob * data.seq_length)) + sequences - 1


def prediction_budgets(lengths: NDArray[np.int64], data: DataConfig, objective: ObjectiveConfig) -> NDArray[np.int64]:
    """[n] most predictions of sequences of `lengths`, so that no row exceeds its slots, whatever shares a row with it.

    Alone in a row a sequence may use every slot (BERT's max_predictions_per_seq). Where packed rows were given fewer
    slots than they can need, each sequence has one and its share by length of the others.
    """
    slots = prediction_slots(data, objective)
    if not data.packing or slots >= _slots_needed(data, objective):
        return np.full(len(lengths), slots, dtype=np.int64)
    shared = slots - data.max_sequences_per_row
    return 1 + shared * np.asarray(lengths, dtype=np.int64) // data.seq_length


def collate(rows: Sequence[Sequence[Example]], shape: BatchShape) -> Batch:
    """Rows of examples as one Batch [b = len(rows), ...]."""
    return to_batch(collate_arrays(rows, shape), len(rows), shape)


def collate_arrays(rows: Sequence[Sequence[Example]], shape: BatchShape) -> NDArray[np.int32]:
    """Rows of examples as one flat array: each field of `shape.fields()`, [b, columns], after the other."""
    flat = np.zeros(len(rows) * sum(shape.fields().values()), dtype=np.int32)
    fields = split_fields(flat, len(rows), shape)
    fields["input_ids"].fill(shape.pad_id)
    fields["sequence_starts"].fill(shape.seq_length)
    for term in shape.terms:
        fields[f"labels.{term}"].fill(IGNORE_LABEL)
    for row, examples in enumerate(rows):
        _fill_row({name: values[row] for name, values in fields.items()}, examples)
    return flat


def split_fields(flat: NDArray[np.int32], num_rows: int, shape: BatchShape) -> dict[str, NDArray[np.int32]]:
    """Views [b, columns] of a flat array by field."""
    fields, offset = {}, 0
    for name, columns in shape.fields().items():
        fields[name] = flat[offset : offset + num_rows * columns].reshape(num_rows, columns)
        offset += num_rows * columns
    return fields


def _fill_row(fields: dict[str, NDArray[np.int32]], examples: Sequence[Example]) -> None:
    """Write one row's sequences one after another; predictions fill the slots in the same order."""
    start, slot = 0, 0
    masked_labels, pair_labels = fields.get(f"labels.{MASKED_LM}"), fields.get(f"labels.{NEXT_SENTENCE}")
    causal_labels = fields.get(f"labels.{CAUSAL_LM}")
    for sequence, example in enumerate(examples):
        end, next_slot = start + len(example.input_ids), slot + len(example.prediction_positions)
        fields["input_ids"][start:end] = example.input_ids
        fields["token_type_ids"][start:end] = example.token_type_ids
        fields["position_ids"][start:end] = np.arange(end - start)
        fields["sequence_ids"][start:end] = sequence + 1
        fields["sequence_starts"][sequence] = start
        fields["cls_positions"][sequence] = start
        fields["prediction_positions"][slot:next_slot] = example.prediction_positions + start
        if masked_labels is not None:
            masked_labels[slot:next_slot] = example.prediction_labels
        if causal_labels is not None:
            causal_labels[start + example.prediction_positions] = example.prediction_labels
        if pair_labels is not None and example.is_random_next != NO_LABEL:
            pair_labels[sequence] = example.is_random_next
        start, slot = end, next_slot
    fields["sequence_starts"][len(examples)] = start


def to_batch(flat: NDArray[np.int32], num_rows: int, shape: BatchShape) -> Batch:
    """The Batch whose contiguous int64 tensors share one buffer made of the flat array."""
    import torch

    buffer = torch.from_numpy(flat).to(torch.int64)
    sizes = [num_rows * columns for columns in shape.fields().values()]
    pieces = [piece.view(num_rows, -1) for piece in buffer.split(sizes)]
    fields = dict(zip(shape.fields(), pieces, strict=True))
    labels = {term: fields.pop(f"labels.{term}") for term in shape.terms}
    return Batch(**fields, labels=labels)
