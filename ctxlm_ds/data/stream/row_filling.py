"""The compiled loop of collate.py: corrupted sequences into rows of constant shape."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.numba_random import compiled
from ctxlm_ds.data.sample import IGNORE_LABEL, NO_LABEL, Examples

Field = NDArray[np.int32]


class RowFields(NamedTuple):
    """Views [b, columns] of a micro-batch's flat array; a label that the objective has not is [b, 0]."""

    input_ids: Field
    token_type_ids: Field
    position_ids: Field
    sequence_ids: Field
    sequence_starts: Field
    prediction_positions: Field
    cls_positions: Field
    masked_lm: Field
    causal_lm: Field
    next_sentence: Field


FITS = -1


@compiled
def fill_rows(examples: Examples, row_starts: NDArray[np.int64], fields: RowFields, pad_id: int) -> int:
    """Write every place of every field; FITS, or the first row whose sequences or predictions do not fit.

    Args:
        examples: sample.Examples.
        row_starts: [b + 1] first sequence of each row.
        fields: RowFields.
        pad_id: what fills `input_ids` beyond the sequences.
    """
    for row in range(len(row_starts) - 1):
        first, after = row_starts[row], row_starts[row + 1]
        tokens = examples.starts[after] - examples.starts[first]
        predictions = examples.prediction_starts[after] - examples.prediction_starts[first]
        if (
            after - first > fields.cls_positions.shape[1]
            or tokens > fields.input_ids.shape[1]
            or predictions > fields.prediction_positions.shape[1]
        ):
            return row
        fill_tokens(examples, first, after, fields, row, pad_id)
        fill_predictions(examples, first, after, fields, row)
        fill_sequences(examples, first, after, fields, row)
    return FITS


@compiled
def fill_tokens(examples: Examples, first: int, after: int, fields: RowFields, row: int, pad_id: int) -> None:
    """Fields with a number for every position of the row."""
    ids, types = fields.input_ids[row], fields.token_type_ids[row]
    positions, sequences = fields.position_ids[row], fields.sequence_ids[row]
    place = 0
    for number in range(first, after):
        source = examples.input_ids[examples.starts[number] : examples.starts[number + 1]]
        end, second_start = place + len(source), examples.second_starts[number]
        ids[place:end] = source
        sequences[place:end] = number - first + 1
        for position in range(len(source)):
            types[place + position] = position >= second_start
            positions[place + position] = position
        place = end
    ids[place:] = pad_id
    types[place:] = 0
    positions[place:] = 0
    sequences[place:] = 0


@compiled
def fill_predictions(examples: Examples, first: int, after: int, fields: RowFields, row: int) -> None:
    """Prediction slots and the labels of words; predictions fill the slots in the order of the sequences."""
    slots, masked, causal = fields.prediction_positions[row], fields.masked_lm[row], fields.causal_lm[row]
    causal[:] = IGNORE_LABEL
    slot = 0
    for number in range(first, after):
        start = examples.starts[number] - examples.starts[first]
        for prediction in range(examples.prediction_starts[number], examples.prediction_starts[number + 1]):
            position = start + examples.prediction_positions[prediction]
            slots[slot] = position
            if len(masked):
                masked[slot] = examples.prediction_labels[prediction]
            if len(causal):
                causal[position] = examples.prediction_labels[prediction]
            slot += 1
    slots[slot:] = 0
    masked[slot:] = IGNORE_LABEL


@compiled
def fill_sequences(examples: Examples, first: int, after: int, fields: RowFields, row: int) -> None:
    """Fields with a number for every sequence of the row."""
    starts, cls_positions, labels = fields.sequence_starts[row], fields.cls_positions[row], fields.next_sentence[row]
    starts[:] = fields.input_ids.shape[1]
    cls_positions[:] = 0
    labels[:] = IGNORE_LABEL
    for number in range(first, after):
        sequence = number - first
        starts[sequence] = cls_positions[sequence] = examples.starts[number] - examples.starts[first]
        if len(labels) and examples.is_random_next[number] != NO_LABEL:
            labels[sequence] = examples.is_random_next[number]
    starts[after - first] = examples.starts[after] - examples.starts[first]
