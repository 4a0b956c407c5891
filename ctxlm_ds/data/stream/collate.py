"""Examples to micro-batches of one constant shape (DESIGN decision 3).

In: the sequences of rows (several a row where rows are packed, none in an empty one). Out: one flat int32 array, which
is what a loader worker sends to the training process (one pickle, no shared memory), and the Batch of int64 tensors
made of it. Not here: corruption (the objective's, injected through the protocol below), the order of rows (sampler).

Shape letters as in data/sample.py: b rows, s positions, p prediction slots, m sequences of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.sample import Batch, Examples, Samples
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.sections import DataSection, ObjectiveSection

MASKED_LM = "masked_lm"
CAUSAL_LM = "causal_lm"
NEXT_SENTENCE = "next_sentence"


class Objective(Protocol):
    """What the data needs of an objective: the corruption of samples and the names of its loss terms."""

    @property
    def terms(self) -> tuple[str, ...]: ...

    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> Examples:
        """Corrupt samples with the random words of each (streams of `key`), at most budgets[i] predictions in i."""
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


def batch_shape(data: DataSection, objective: ObjectiveSection, terms: tuple[str, ...], pad_id: int) -> BatchShape:
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


def prediction_slots(data: DataSection, objective: ObjectiveSection) -> int:
    """Prediction slots of a row: the setting, or what no row can exceed (each sequence rounds up by less than one).

    causal_lm predicts at every position.
    """
    if objective.name == CAUSAL_LM:
        return data.seq_length
    if objective.max_predictions is not None:
        return objective.max_predictions
    return _slots_needed(data, objective)


def _slots_needed(data: DataSection, objective: ObjectiveSection) -> int:
    sequences = data.max_sequences_per_row if getattr(data, "packing", False) else 1
    return max(1, math.ceil(objective.mask_prob * data.seq_length)) + sequences - 1


def prediction_budgets(lengths: NDArray[np.int64], data: DataSection, objective: ObjectiveSection) -> NDArray[np.int64]:
    """[n] most predictions of sequences of `lengths`, so that no row exceeds its slots, whatever shares a row with it.

    Alone in a row a sequence may use every slot (BERT's max_predictions_per_seq). Where packed rows were given fewer
    slots than they can need, each sequence has one and its share by length of the others.
    """
    slots = prediction_slots(data, objective)
    if not getattr(data, "packing", False) or slots >= _slots_needed(data, objective):
        return np.full(len(lengths), slots, dtype=np.int64)
    shared = slots - data.max_sequences_per_row
    return 1 + shared * np.asarray(lengths, dtype=np.int64) // data.seq_length


def collate_arrays(examples: Examples, row_starts: NDArray[np.int64], shape: BatchShape) -> NDArray[np.int32]:
    """Rows as one flat array: each field of `shape.fields()`, [b, columns], after the other.

    Args:
        examples: the sequences of all rows, row after row.
        row_starts: [b + 1] first sequence of each row.

    Raises:
        DataError: a row has more tokens, sequences or predictions than the shape has places.
    """
    from ctxlm_ds.data.stream.row_filling import FITS, RowFields, fill_rows  # compiled: planning has no use for numba

    num_rows = len(row_starts) - 1
    flat = np.empty(num_rows * sum(shape.fields().values()), dtype=np.int32)
    fields = split_fields(flat, shape)
    absent = np.empty((num_rows, 0), dtype=np.int32)
    labels = (fields.pop(f"labels.{term}", absent) for term in (MASKED_LM, CAUSAL_LM, NEXT_SENTENCE))
    masked_lm, causal_lm, next_sentence = labels
    row_fields = RowFields(**fields, masked_lm=masked_lm, causal_lm=causal_lm, next_sentence=next_sentence)
    row = fill_rows(examples, row_starts, row_fields, shape.pad_id)
    if row != FITS:
        raise DataError(
            f"row {row} of a micro-batch does not fit into {shape.seq_length} positions, {shape.sequences_per_row} "
            f"sequences and {shape.prediction_slots} predictions; the sample index is damaged: delete its folder and "
            "build it again (tools/build_samples.py)"
        )
    return flat


def rows_in(flat: NDArray[np.int32], shape: BatchShape) -> int:
    """Rows that a flat array holds."""
    return len(flat) // sum(shape.fields().values())


def split_fields(flat: NDArray[np.int32], shape: BatchShape) -> dict[str, NDArray[np.int32]]:
    """Views [b, columns] of a flat array by field."""
    fields, offset, num_rows = {}, 0, rows_in(flat, shape)
    for name, columns in shape.fields().items():
        fields[name] = flat[offset : offset + num_rows * columns].reshape(num_rows, columns)
        offset += num_rows * columns
    return fields


def to_batches(
    flat: NDArray[np.int32], shape: BatchShape, micro_batch_size: int, pin_memory: bool = False
) -> list[Batch]:
    """The rows of a flat array as micro-batches, whose contiguous int64 tensors share one buffer.

    Args:
        pin_memory: in page-locked memory, from which a GPU copies while it computes.
    """
    import torch

    buffer = torch.empty(len(flat), dtype=torch.int64, pin_memory=pin_memory)
    buffer.copy_(torch.from_numpy(flat))
    columns = shape.fields()
    num_rows = rows_in(flat, shape)
    pieces = buffer.split([num_rows * count for count in columns.values()])
    batches = []
    for tensors in zip(*(piece.view(num_rows, -1).split(micro_batch_size) for piece in pieces), strict=True):
        fields = dict(zip(columns, tensors, strict=True))
        labels = {term: fields.pop(f"labels.{term}") for term in shape.terms}
        batches.append(Batch(**fields, labels=labels))
    return batches
