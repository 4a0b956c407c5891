"""A rank's share of every layer."""

from __future__ import annotations

import pytest

from ctxlm_ds.parallel.context import ParallelContext


@pytest.mark.parametrize(("size", "asked", "splits"), [(1, True, False), (2, False, False), (2, True, True)])
def test_tokens_are_split_if_several_ranks_are_asked_to(size: int, asked: bool, splits: bool) -> None:
    assert ParallelContext(size, sequence_parallel=asked).splits_tokens is splits


@pytest.mark.parametrize(
    ("size", "multiple", "words", "rows"),
    [
        (1, 1, 61, 61), (1, 8, 61, 64), (2, 1, 61, 31), (2, 8, 61, 32), (4, 128, 61, 128),
        # By default a large vocabulary is aligned.
        (1, None, 4095, 4095), (1, None, 4096, 4096), (1, None, 30522, 30592), (2, None, 30522, 15360),
        (8, None, 30522, 3816),
    ],
)  # fmt: skip
def test_rows_of_the_vocabulary(size: int, multiple: int | None, words: int, rows: int) -> None:
    assert ParallelContext(size, vocab_multiple=multiple).vocabulary_rows(words) == rows
