"""Curves of a run that goes on, and their picture in characters."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from ctxlm_ds.training.hooks.curves import (
    GROWING_POINTS,
    TRAINING,
    Chart,
    LossCurves,
    curve_lines,
    status_view,
    terminal_picture,
)

CHART = Chart("loss", {"training": [(1, 6.0), (6, 5.0), (11, 4.0)], "dev": [(11, 4.5)]})


def test_picture_in_characters() -> None:
    lines = terminal_picture(CHART, columns=21, lines=5)
    assert [line.rstrip() for line in lines] == [
        "          loss",
        "       6 |.",
        "         |",
        "         |          .",
        "         |                    o",
        "       4 |                    .",
        "         +---------------------",
        "          step 1             11",
        "          . training   o dev",
    ]


def curves_of(folder: Path, step: int = 20) -> LossCurves:
    """Those of a run that goes on after a step and does 20 more."""
    records = [{"step": number, "loss": None if number == 4 else 9.0 - number / 10} for number in range(1, 26)]
    lines = [json.dumps(record) for record in [*records, {"step": 10, "eval/dev/loss": 8.5, "eval/dev/mlm": 1.0}]]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    curves = LossCurves(step, folder / "metrics.jsonl")
    for number in range(step + 1, step + 21):
        curves.add(number, {"loss": 9.0 - number / 10})
    return curves


def test_the_curve_begins_before_a_resume(tmp_path: Path) -> None:
    curves = curves_of(tmp_path)
    curves.add(40, {"eval/dev/loss": 5.5})
    *picture, axis, steps, names = curves.picture(41, 5)
    assert len(picture) == 5 and picture[0].startswith("     8.9 |.") and picture[-1].startswith("       5 |")
    assert steps.split() == ["step", "1", "40"] and names.split() == [".", "training", "loss", "o", "dev"]
    assert "".join(picture).count("o") == 2
    curves.go_back(30)
    assert curves.picture(41, 5)[-2].split() == ["step", "1", "30"]


def test_a_curve_needs_two_points(tmp_path: Path) -> None:
    curves = LossCurves(0, tmp_path / "metrics.jsonl")
    curves.add(1, {"loss": 2.0})
    assert curves.picture(40, 5) == []


def test_a_curve_of_many_steps_stays_small(tmp_path: Path) -> None:
    curves = LossCurves(0, tmp_path / "metrics.jsonl")
    for step in range(1, 100_001):
        curves.add(step, {"loss": 100_000 / step if step % 7 else math.nan})
    points = curves._curves[TRAINING]
    assert GROWING_POINTS / 2 <= len(points) <= GROWING_POINTS and points[-1][0] == 100_000 == max(points)[0]
    assert points == sorted(points) and abs(points[-1][1] - 1.0) < 0.02


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
