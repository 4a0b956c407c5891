"""Curves over the steps of a run, and their picture in characters for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.process.line_file import HELD_OUT, read_lines

COLUMNS, LINES = 64, 12
"""Characters of a picture."""
MARKS = ".o+x*#@%"
LEVEL_MARK = "-"
GROWING_POINTS = 512
"""Most points of a curve that grows while it is drawn."""
TRAINING = "training loss"

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Curves over the steps of a run, and horizontal lines to compare them with."""

    title: str
    curves: Mapping[str, Points]
    levels: Mapping[str, float]

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """First and last step, least and greatest value; never equal."""
        points = [point for curve in self.curves.values() for point in curve]
        steps = [step for step, _ in points] or [0.0]
        values = [value for _, value in points] + list(self.levels.values()) or [0.0]
        low, high = min(values), max(values)
        return min(steps), max(max(steps), min(steps) + 1), low, high if high > low else low + (abs(low) or 1.0)


def terminal_picture(chart: Chart, columns: int = COLUMNS, lines: int = LINES) -> list[str]:
    """Draw a chart with characters: a line of the picture for each string, the legend last."""
    first, last, low, high = chart.bounds
    cells = [[" "] * columns for _ in range(lines)]

    def row(value: float) -> int:
        return round((lines - 1) * (high - value) / (high - low))

    for value in chart.levels.values():
        cells[row(value)] = [LEVEL_MARK] * columns
    for mark, points in zip(MARKS, chart.curves.values(), strict=False):
        for step, value in points:
            cells[row(value)][round((columns - 1) * (step - first) / (last - first))] = mark
    shown = {0: f"{high:.3g}", lines - 1: f"{low:.3g}"}
    picture = [f"{shown.get(number, ''):>8} |{''.join(line)}".rstrip() for number, line in enumerate(cells)]
    legend = [f"{mark} {name}" for mark, name in zip(MARKS, chart.curves, strict=False)]
    legend += [f"{LEVEL_MARK} {name} ({value:.3g})" for name, value in chart.levels.items()]
    steps = f"{'':>9} {f'step {first:.0f}':<{columns - 8}}{f'{last:.0f}':>8}"
    axis = f"{'':>8} +{'-' * columns}"
    return [f"{'':>9} {chart.title}", *picture, axis, steps, f"{'':>9} {'   '.join(legend)}"]


class LossCurves:
    """The loss in training and on each held-out source during a run, in bounded memory."""

    def __init__(self, step: int, metrics: Path) -> None:
        """Start after a step, with what metrics.jsonl has of the steps before."""
        self._curves: dict[str, Points] = {TRAINING: []}
        for record in read_lines(metrics, GROWING_POINTS):
            if record["step"] <= step:
                self.add(record["step"], record)

    def add(self, step: int, figures: Mapping[str, Any]) -> None:
        """Add `loss` and each `eval/SOURCE/loss` of a step; a value that is not finite leaves a gap."""
        for name, value in figures.items():
            held_out = name.startswith(HELD_OUT) and name.endswith("/loss")
            if (held_out or name == "loss") and value is not None and math.isfinite(value):
                curve = name.removeprefix(HELD_OUT).removesuffix("/loss") if held_out else TRAINING
                points = self._curves.setdefault(curve, [])
                points.append((float(step), value))
                if len(points) > GROWING_POINTS:
                    # An older point is a mean over more steps.
                    pairs = zip(points[0:-1:2], points[1::2], strict=True)
                    points[:-1] = [(later, (one + other) / 2) for (_, one), (later, other) in pairs]

    def go_back(self, step: int) -> None:
        """Forget the steps after this one."""
        for points in self._curves.values():
            points[:] = [point for point in points if point[0] <= step]

    def picture(self, columns: int, lines: int) -> list[str]:
        """Return the lines of a picture with its axis and names; empty before the second point."""
        if len(self._curves[TRAINING]) < 2:
            return []
        return terminal_picture(Chart("loss", self._curves, {}), columns, lines)[1:]
