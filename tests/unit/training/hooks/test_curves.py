"""Curves of a run that goes on, and their picture in characters."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ctxlm_ds.process.run_files import read_lines
from ctxlm_ds.training.hooks.curves import TRAINING, Chart, curve_lines, figure_chart, status_view, terminal_picture

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


def test_a_chart_of_the_file_of_metrics(tmp_path: Path) -> None:
    records = [{"step": number, "loss": None if number == 4 else 9.0 - number / 10} for number in range(1, 41)]
    records.insert(10, {"step": 10, "eval/dev/loss": 8.5, "eval/dev/mlm": 1.0})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    chart = figure_chart("loss", list(read_lines(tmp_path / "metrics.jsonl", 500)), "loss", "loss")
    assert chart.curves["dev"] == [(10.0, 8.5)] and len(chart.curves[TRAINING]) == 39
    *picture, axis, steps, names = terminal_picture(chart, 41, 5)[1:]
    assert len(picture) == 5 and picture[0].startswith("     8.9 |.") and picture[-1].startswith("       5 |")
    assert steps.split() == ["step", "1", "40"] and names.split() == [".", "training", "o", "dev"]


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
