"""The rows of the live table fit the terminal; test_status.py draws it on one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ctxlm_ds.training.live_table import fitting, status_view

CELLS = {"step": "16/40", "loss": "0.2500", "masked_lm": "0.2250", "tokens/s": "3,200"}


def test_cells_fill_as_many_rows_as_the_width_needs() -> None:
    assert fitting(CELLS, 80) == [CELLS]
    assert [list(row) for row in fitting(CELLS, 30)] == [["step", "loss", "masked_lm"], ["tokens/s"]]
    assert [list(row) for row in fitting(CELLS, 3)] == [[name] for name in CELLS]


@pytest.mark.parametrize("width", range(30, 60))
def test_nothing_is_cut_on_a_narrow_terminal(width: int) -> None:
    shown = io.StringIO()
    view = status_view("a run", CELLS, 0.4, ["0:24 left", "no checkpoint yet"], width)
    Console(file=shown, width=width).print(view)
    assert all(len(line) <= width for line in shown.getvalue().splitlines())
    assert all(text in shown.getvalue() for text in (*CELLS, *CELLS.values(), "40%  0:24 left", "no checkpoint yet"))
