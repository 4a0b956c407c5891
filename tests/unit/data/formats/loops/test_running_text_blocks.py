"""The loop that cuts blocks: every token but a text's first is predicted once, whatever the buffers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ctxlm_ds.data.formats.loops import running_text as loops


def block_rows(bounds: NDArray[np.int64], seq_length: int, slots: int) -> list[list[tuple[int, int]]]:
    """Rows of pieces (first token, token after the last)."""
    records, counts = zip(*loops.block_pieces(bounds, seq_length, slots), strict=True)
    pieces = np.concatenate(records)[["a_start", "a_end"]].tolist()
    ends = np.cumsum(np.concatenate(counts)).tolist()
    return [pieces[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    seq_length=st.integers(1, 24),
    slots=st.integers(1, 5),
)
@settings(max_examples=200)
def test_every_token_but_a_texts_first_is_predicted_once_and_rows_are_full(
    lengths: list[int], seq_length: int, slots: int
) -> None:
    bounds = np.cumsum([0, *lengths])
    rows = block_rows(bounds, seq_length, slots)
    predicted = [token for row in rows for start, stop in row for token in range(start + 1, stop)]
    assert predicted == [token for token in range(bounds[-1]) if token not in set(bounds.tolist())]
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    for row in rows:
        used = sum(stop - start - 1 for start, stop in row)
        assert 1 <= used <= seq_length and len(row) <= slots
        assert all(document_of[start] == document_of[stop - 1] for start, stop in row)
        assert used == seq_length or len(row) == slots or row is rows[-1]


@pytest.mark.parametrize("slots", [1, 4])
def test_buffers_change_no_block(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    bounds = np.cumsum([0, *np.random.default_rng(2).integers(1, 40, size=300)])
    expected = [np.concatenate(parts).tolist() for parts in zip(*loops.block_pieces(bounds, 16, slots), strict=True)]
    monkeypatch.setattr(loops, "RECORDS_AT_ONCE", 5)
    found = [np.concatenate(parts).tolist() for parts in zip(*loops.block_pieces(bounds, 16, slots), strict=True)]
    assert found == expected
