"""The choice of a row: the first that suits and runs, or the named one, which must run."""

from __future__ import annotations

import pytest

from ctxlm_ds.errors import KernelError
from ctxlm_ds.kernels.implementation import Implementation, choose
from tests.unit.kernels.test_dispatch import ON_CPU


def test_auto_takes_the_first_row_that_suits_and_runs() -> None:
    table = (
        Implementation("unsuitable", lambda need: 0, suits=lambda need: False),
        Implementation("broken", lambda need: 1, lambda need: "it is broken"),
        Implementation("good", lambda need: 2),
        Implementation("also_good", lambda need: 3),
    )
    assert [choose("work", name, table, ON_CPU).name for name in ("auto", "unsuitable", "also_good")] == [
        "good", "unsuitable", "also_good",
    ]  # fmt: skip
    with pytest.raises(KernelError, match=r"kernels\.work: `broken` cannot run here: it is broken\..*`good` here"):
        choose("work", "broken", table, ON_CPU)
