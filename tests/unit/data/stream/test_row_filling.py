"""Examples in the fields of rows, written out by hand: two sequences in the first row, one in the second."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ctxlm_ds.data.fields import FITS, MOST_BOUNDARY_TARGETS
from ctxlm_ds.data.sample import NO_LABEL, Examples, empty_examples
from ctxlm_ds.data.stream import row_filling

ROWS = np.array([0, 2, 3])
CLS = 1


def examples_of(lengths: list[int], positions: list[list[int]]) -> Examples:
    """Tokens count up from 10; the label of a prediction is its position in the flat arrays, plus 100."""
    made = empty_examples(np.array(lengths), np.array(list(map(len, positions))))
    made.input_ids[:] = 10 + np.arange(sum(lengths))
    made.input_ids[made.starts[:-1]] = CLS
    flat = [place for places in positions for place in places]
    made.prediction_positions[:] = flat
    made.prediction_labels[:] = 100 + np.arange(len(flat))
    made.second_starts[:] = [2, *lengths[1:]]
    made.sequence_labels[:] = [1, *[NO_LABEL] * (len(lengths) - 1)]
    return made


@pytest.fixture
def examples() -> Examples:
    return examples_of([3, 2, 4], [[1], [1], [1, 3]])


def empty(columns: int, fill: int = 0) -> NDArray[np.int32]:
    return np.full((2, columns), fill, dtype=np.int32)


@pytest.mark.parametrize(
    ("positions", "sequences", "predictions", "misfit"),
    [(5, 2, 2, FITS), (4, 2, 2, 0), (5, 1, 2, 0), (5, 2, 1, 0), (9, 9, 9, FITS)],
)
def test_the_first_row_that_does_not_fit(
    examples: Examples, positions: int, sequences: int, predictions: int, misfit: int
) -> None:
    assert row_filling.first_misfit(examples, ROWS, positions, sequences, predictions) == misfit


def test_a_later_row_that_does_not_fit() -> None:
    assert row_filling.first_misfit(examples_of([3, 2, 4], [[], [], [1, 2, 3]]), ROWS, 5, 2, 2) == 1


def test_tokens_positions_and_numbers(examples: Examples) -> None:
    ids, positions, numbers = empty(6, 3), empty(6), empty(6)
    row_filling.fill_tokens(examples, ROWS, ids, positions, numbers)
    assert ids.tolist() == [[1, 11, 12, 1, 14, 3], [1, 16, 17, 18, 3, 3]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]]
    assert numbers.tolist() == [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]]


def test_token_types_starts_and_labels_of_sequences(examples: Examples) -> None:
    types, starts, without_end, labels = empty(6), empty(3, 6), empty(2), empty(2, -100)
    row_filling.fill_token_types(examples, ROWS, types)
    row_filling.fill_starts(examples, ROWS, starts, True)
    row_filling.fill_starts(examples, ROWS, without_end, False)
    row_filling.fill_sequence_labels(examples, ROWS, labels)
    assert types.tolist() == [[0, 0, 1, 0, 0, 0], [0] * 6]
    assert starts.tolist() == [[0, 3, 5], [0, 4, 6]]
    assert without_end.tolist() == [[0, 3], [0, 0]]
    assert labels.tolist() == [[1, -100], [-100, -100]]


def test_predictions_in_slots_and_at_their_positions(examples: Examples) -> None:
    slots, labels, at_positions = empty(3), empty(3, -100), empty(6, -100)
    row_filling.fill_slots(examples, ROWS, slots, labels)
    row_filling.fill_position_labels(examples, ROWS, at_positions)
    assert slots.tolist() == [[1, 4, 0], [1, 3, 0]]
    assert labels.tolist() == [[100, 101, -100], [102, 103, -100]]
    assert at_positions.tolist() == [[-100, 100, -100, -100, 101, -100], [-100, 102, -100, 103, -100, -100]]


def test_boundaries_of_spans() -> None:
    """A span beside a special token has none, nor one at the end; of a long one the first targets have."""
    longest = MOST_BOUNDARY_TARGETS + 2
    span = list(range(3, 3 + longest))
    examples = examples_of([3, 2, longest + 5], [[1], [1], [1, *span]])
    slots = longest + 1
    is_special = np.zeros(64, dtype=np.bool_)
    is_special[CLS] = True
    around, offsets, labels = empty(2 * slots), empty(slots), empty(slots, -100)
    row_filling.fill_boundaries(examples, ROWS, is_special, around, offsets, labels)
    assert not around[0].any() and (labels[0] == -100).all(), "both spans of the first row stand beside [CLS]"
    # Slot 0 of the second row is the span of position 1 beside [CLS]; the long one runs from 3 to 3 + longest.
    used = slice(1, 1 + MOST_BOUNDARY_TARGETS)
    assert (around[1, :slots][used] == 2).all() and (around[1, slots:][used] == 3 + longest).all()
    assert offsets[1, used].tolist() == list(range(MOST_BOUNDARY_TARGETS))
    assert labels[1, used].tolist() == list(range(103, 103 + MOST_BOUNDARY_TARGETS))
    assert labels[1, 0] == -100 and (labels[1, 1 + MOST_BOUNDARY_TARGETS :] == -100).all()
