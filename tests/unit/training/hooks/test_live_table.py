"""The rows of the live table and the curve below fit the terminal; test_status.py draws it on one."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ctxlm_ds.training.hooks.live_table import (
    LEFT_OF_CURVE,
    LossCurves,
    curve_lines,
    fitting,
    status_height,
    status_view,
)

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


def curves_of(folder: Path, step: int = 20) -> LossCurves:
    """Those of a run that goes on after a step and does 20 more."""
    records = [{"step": number, "loss": None if number == 4 else 9.0 - number / 10} for number in range(1, 26)]
    lines = [json.dumps(record) for record in [*records, {"step": 10, "eval/dev/loss": 8.5, "eval/dev/mlm": 1.0}]]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    curves = LossCurves(step, folder / "metrics.jsonl")
    for number in range(step + 1, step + 21):
        curves.add(number, 9.0 - number / 10)
    return curves


def test_the_curve_begins_before_a_resume(tmp_path: Path) -> None:
    curves = curves_of(tmp_path)
    curves.add_held_out(40, {"eval/dev/loss": 5.5})
    *picture, axis, steps, names = curves.picture(41, 5)
    assert len(picture) == 5 and picture[0].startswith("     8.9 |.") and picture[-1].startswith("       5 |")
    assert steps.split() == ["step", "1", "40"] and names.split() == [".", "training", "loss", "o", "dev"]
    assert "".join(picture).count("o") == 2
    curves.go_back(30)
    assert curves.picture(41, 5)[-2].split() == ["step", "1", "30"]


def test_a_curve_needs_two_points(tmp_path: Path) -> None:
    curves = LossCurves(0, tmp_path / "metrics.jsonl")
    curves.add(1, 2.0)
    assert curves.picture(40, 5) == []


@pytest.mark.parametrize(("height", "used", "lines"), [(24, 8, 5), (60, 8, 8), (17, 8, 0), (24, 17, 3), (24, 18, 0)])
def test_the_curve_leaves_room_for_the_log(height: int, used: int, lines: int) -> None:
    assert curve_lines(height, used) == lines


@pytest.mark.parametrize("width", (45, 80, 200))
def test_the_view_is_as_high_as_it_says(width: int, tmp_path: Path) -> None:
    facts, shown = ["held out at step 20: dev loss 1.0", "no checkpoint yet"], io.StringIO()
    picture = curves_of(tmp_path).picture(width - LEFT_OF_CURVE, 4)
    Console(file=shown, width=width).print(status_view("a run", CELLS, 0.4, ["0:24 left", *facts, *picture], width))
    lines = shown.getvalue().rstrip("\n").split("\n")
    assert len(lines) == status_height(CELLS, facts, width) + 7
    assert lines[-7:] == picture and all(len(line) <= width for line in lines)
