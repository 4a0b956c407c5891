"""A rank's share of every layer, and its count of collectives."""

from __future__ import annotations

import pytest

from ctxlm_ds.parallel.context import ParallelContext, TrafficCounter


def test_calls_and_bytes_are_counted_by_operation() -> None:
    traffic = TrafficCounter()
    for operation, num_bytes in (("all_reduce", 8), ("all_gather", 3), ("all_reduce", 4)):
        traffic.add(operation, num_bytes)
    assert (traffic.calls, traffic.num_bytes) == (
        {"all_reduce": 2, "all_gather": 1},
        {"all_reduce": 12, "all_gather": 3},
    )
    traffic.reset()
    assert not traffic.calls and not traffic.num_bytes


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
