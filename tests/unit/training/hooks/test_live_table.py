"""The rows of the live table and the curve below fit the terminal; test_status.py draws it on one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ctxlm_ds.training.hooks.live_table import curve_lines, status_view

CELLS = {"step": "16/40", "loss": "0.2500", "masked_lm": "0.2250", "tokens/s": "3,200"}


@pytest.mark.parametrize("width", range(30, 60))
def test_nothing_is_cut_on_a_narrow_terminal(width: int) -> None:
    shown = io.StringIO()
    view = status_view("a run", CELLS, 0.4, ["0:24 left", "no checkpoint yet"])
    Console(file=shown, width=width).print(view)
    assert all(len(line) <= width for line in shown.getvalue().splitlines())
    assert all(text in shown.getvalue() for text in (*CELLS, *CELLS.values(), "40%  0:24 left", "no checkpoint yet"))


@pytest.mark.parametrize(("height", "used", "lines"), [(24, 8, 5), (60, 8, 8), (17, 8, 0), (24, 17, 3), (24, 18, 0)])
def test_the_curve_leaves_room_for_the_log(height: int, used: int, lines: int) -> None:
    assert curve_lines(height, used) == lines
