"""Compiled loops that write examples into the fields of rows, called by an objective's `fill`.

Every field [b, columns] already holds its fill value: these loops write only occupied places. `examples` is
sample.Examples, `row_starts` [b + 1] the first sequence of each row, and the rows must fit (first_misfit).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.fields import FITS, MOST_BOUNDARY_TARGETS
from ctxlm_ds.data.numba_random import compiled, put
from ctxlm_ds.data.sample import NO_LABEL, Examples

FieldArray = NDArray[np.int32]
Starts = NDArray[np.int64]


@compiled
def first_misfit(examples: Examples, row_starts: Starts, positions: int, sequences: int, predictions: int) -> int:
    """Return the first row with more positions, sequences or predictions than these; FITS if there is none."""
    for row in range(len(row_starts) - 1):
        first, after = row_starts[row], row_starts[row + 1]
        if (
            after - first > sequences
            or examples.starts[after] - examples.starts[first] > positions
            or examples.prediction_starts[after] - examples.prediction_starts[first] > predictions
        ):
            return row
    return FITS


@compiled
def fill_tokens(
    examples: Examples, row_starts: Starts, input_ids: FieldArray, position_ids: FieldArray, sequence_ids: FieldArray
) -> None:
    """Write the tokens of each row, their positions in their sequence, and its number in the row."""
    for row in range(len(row_starts) - 1):
        ids, positions, sequences = input_ids[row], position_ids[row], sequence_ids[row]
        first, place = row_starts[row], 0
        for number in range(first, row_starts[row + 1]):
            source = examples.input_ids[examples.starts[number] : examples.starts[number + 1]]
            sequences[place : place + len(source)] = number - first + 1
            for position, token in enumerate(source):
                ids[place + position], positions[place + position] = token, position
            place += len(source)


@compiled
def fill_values(examples: Examples, row_starts: Starts, values: NDArray[np.int32], field: FieldArray) -> None:
    """Write a value [t] of each token at its place."""
    for row in range(len(row_starts) - 1):
        begin, end = examples.starts[row_starts[row]], examples.starts[row_starts[row + 1]]
        put(field[row], values[begin:end])


@compiled
def fill_token_types(examples: Examples, row_starts: Starts, token_type_ids: FieldArray) -> None:
    """Write 0 before and 1 from the second segment on."""
    for row in range(len(row_starts) - 1):
        types, first = token_type_ids[row], row_starts[row]
        for number in range(first, row_starts[row + 1]):
            begin = examples.starts[number] - examples.starts[first]
            length = examples.starts[number + 1] - examples.starts[number]
            types[begin + examples.second_starts[number] : begin + length] = 1


@compiled
def fill_starts(examples: Examples, row_starts: Starts, starts: FieldArray, with_end: bool) -> None:
    """Write the first position of each sequence, and with `with_end` that of the padding behind the last."""
    for row in range(len(row_starts) - 1):
        first = row_starts[row]
        for number in range(first, row_starts[row + 1] + with_end):
            starts[row, number - first] = examples.starts[number] - examples.starts[first]


@compiled
def fill_sequence_labels(examples: Examples, row_starts: Starts, labels: FieldArray) -> None:
    for row in range(len(row_starts) - 1):
        first = row_starts[row]
        for number in range(first, row_starts[row + 1]):
            if examples.sequence_labels[number] != NO_LABEL:
                labels[row, number - first] = examples.sequence_labels[number]


@compiled
def fill_slots(examples: Examples, row_starts: Starts, prediction_positions: FieldArray, labels: FieldArray) -> None:
    """Write the predictions of each row into its slots, in the order of the sequences: their places and labels."""
    for row in range(len(row_starts) - 1):
        first, slot = row_starts[row], 0
        for number in range(first, row_starts[row + 1]):
            begin = examples.starts[number] - examples.starts[first]
            for prediction in range(examples.prediction_starts[number], examples.prediction_starts[number + 1]):
                prediction_positions[row, slot] = begin + examples.prediction_positions[prediction]
                labels[row, slot] = examples.prediction_labels[prediction]
                slot += 1


@compiled
def fill_boundaries(
    examples: Examples,
    row_starts: Starts,
    bounds_rows: NDArray[np.bool_],
    boundary_positions: FieldArray,
    boundary_offsets: FieldArray,
    labels: FieldArray,
) -> None:
    """Write the span boundary targets of each row, in the slots of fill_slots.

    A span is a run of predicted positions. Its boundaries are the positions before and after it; a span next to a
    special token or the sequence's end has no targets, and a long one has MOST_BOUNDARY_TARGETS (SpanBERT).
    `boundary_positions` [b, 2 * p] receives the positions before the spans, then those after; `boundary_offsets` [b, p]
    the place of each target in its span, from 0; `labels` [b, p] the original tokens. `bounds_rows` [vocabulary] is
    True for special tokens.
    """
    slots = labels.shape[1]
    for row in range(len(row_starts) - 1):
        first, slot = row_starts[row], 0
        for number in range(first, row_starts[row + 1]):
            begin = examples.starts[number] - examples.starts[first]
            ids = examples.input_ids[examples.starts[number] : examples.starts[number + 1]]
            start, end = examples.prediction_starts[number], examples.prediction_starts[number + 1]
            while start < end:
                left = examples.prediction_positions[start] - 1
                after = start + 1
                while after < end and examples.prediction_positions[after] == left + 1 + after - start:
                    after += 1
                right = left + 1 + after - start
                if left >= 0 and right < len(ids) and not bounds_rows[ids[left]] and not bounds_rows[ids[right]]:
                    for offset in range(min(after - start, MOST_BOUNDARY_TARGETS)):
                        boundary_positions[row, slot + offset] = begin + left
                        boundary_positions[row, slots + slot + offset] = begin + right
                        boundary_offsets[row, slot + offset] = offset
                        labels[row, slot + offset] = examples.prediction_labels[start + offset]
                slot += after - start
                start = after


@compiled
def fill_position_labels(examples: Examples, row_starts: Starts, labels: FieldArray) -> None:
    """Write the label of each predicted position at that position."""
    for row in range(len(row_starts) - 1):
        first = row_starts[row]
        for number in range(first, row_starts[row + 1]):
            begin = examples.starts[number] - examples.starts[first]
            for prediction in range(examples.prediction_starts[number], examples.prediction_starts[number + 1]):
                labels[row, begin + examples.prediction_positions[prediction]] = examples.prediction_labels[prediction]
