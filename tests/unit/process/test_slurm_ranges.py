"""Ranges of ranks, tasks and hosts, both ways."""

from __future__ import annotations

import pytest

from ctxlm_ds.process.slurm import expand_numbers, join_numbers


def test_there_and_back() -> None:
    assert expand_numbers("0-2,5,7-8") == ["0", "1", "2", "5", "7", "8"]
    assert expand_numbers("08-10, 3") == ["08", "09", "10", "3"]
    assert join_numbers([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert join_numbers([0, 1, 4, 7, 8]) == "0-1,4,7-8"
    assert join_numbers([3], ", ") == "3" and join_numbers([]) == ""


@pytest.mark.parametrize("text", ["", "a", "1-", "-2", "1-2-3", "4-2", "1,,2"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number or a range|runs backwards"):
        expand_numbers(text)
