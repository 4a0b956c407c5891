"""Rows of encoder and decoder from inputs and targets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from ctxlm_ds.data.fields import FITS, IGNORE_LABEL
from ctxlm_ds.data.sample import TargetExamples, starts_of
from ctxlm_ds.data.stream.collate import split_fields
from ctxlm_ds.objectives.span_corruption import SpanCorruption, SpanCorruptionSection
from ctxlm_ds.recipe.sections import DataSection
from tests.sample_data import FakeTokenizer


class TwoInARow(DataSection):
    sample_format: str = "chunks"

    @property
    def sequences_per_row(self) -> int:
        return 2


def fill(
    inputs: list[list[int]], targets: list[list[int]], row_starts: list[int], start: Literal["pad", "sep"] = "pad"
) -> tuple[int, SimpleNamespace]:
    tokenizer: Any = FakeTokenizer() if start == "sep" else None
    objective = SpanCorruption(SpanCorruptionSection(decoder_start=start), tokenizer)
    fields = SpanCorruption(SpanCorruptionSection()).fields(TwoInARow(seq_length=32))
    rows = len(row_starts) - 1
    arrays = split_fields(np.zeros(rows * sum(field.columns for field in fields), dtype=np.int32), fields)
    for field in fields:
        arrays[field.name][:] = field.fill
    ids, ends = (starts_of(np.array([len(part) for part in parts])) for parts in (inputs, targets))
    flat = [np.array(sum(parts, []), dtype=np.int32) for parts in (inputs, targets)]
    examples = TargetExamples(flat[0], ids, flat[1], ends)
    return objective.fill(examples, np.array(row_starts), arrays), SimpleNamespace(**arrays)


def test_several_targets_of_a_row_each_begin_with_the_start_token() -> None:
    result, row = fill([[5, 6, 7], [8, 9]], [[10, 11], [12, 13]], [0, 2])
    assert result == FITS
    assert row.input_ids[0, :6].tolist() == [5, 6, 7, 8, 9, 0]
    assert row.sequence_ids[0, :6].tolist() == [1, 1, 1, 2, 2, 0]
    assert row.decoder_labels[0].tolist()[:5] == [10, 11, 12, 13, IGNORE_LABEL]
    assert row.decoder_input_ids[0].tolist()[:5] == [0, 10, 0, 12, 0]
    assert row.decoder_position_ids[0].tolist()[:5] == [0, 1, 0, 1, 0]
    assert row.decoder_sequence_ids[0].tolist()[:5] == [1, 1, 2, 2, 0]
    assert row.decoder_sequence_starts[0].tolist() == [0, 2, 4]


def test_the_recipe_may_begin_targets_with_the_end_of_a_text() -> None:
    end = FakeTokenizer().sep_id
    result, row = fill([[5, 6, 7], [8, 9]], [[10, 11], [12, 13]], [0, 2], start="sep")
    assert result == FITS and end != 0
    assert row.decoder_input_ids[0].tolist()[:5] == [end, 10, end, 12, 0]


def test_a_row_that_does_not_fit_is_named() -> None:
    assert fill([[5]] * 2, [[10], [11] * 40], [0, 1, 2])[0] == 1
    assert fill([[5], [6] * 40], [[10]] * 2, [0, 1, 2])[0] == 1
    assert fill([[5]] * 3, [[10]] * 3, [0, 3])[0] == 0
