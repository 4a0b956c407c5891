"""What waits for a job is made to wait for its successor; the rest is tested on a real cluster."""

from __future__ import annotations

import pytest

from ctxlm_ds.cluster.successor import moved_dependency


@pytest.mark.parametrize(
    ("dependency", "expected"),
    [
        ("afterok:24(unfulfilled)", "afterok:29"),
        ("afterok:2(unfulfilled),afterok:24(unfulfilled)", "afterok:2,afterok:29"),
        ("afterok:24(unfulfilled),afterany:7_*(unfulfilled)", "afterok:29,afterany:7"),
        ("afterok:24(failed)", "afterok:29"),
        ("afterok:240(unfulfilled)", None),
        ("singleton(unfulfilled)", None),
        ("(null)", None),
        ("", None),
    ],
)
def test_a_dependency_on_a_job_becomes_one_on_its_successor(dependency: str, expected: str | None) -> None:
    assert moved_dependency(dependency, "24", "29") == expected
