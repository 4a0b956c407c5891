"""Curves of metrics.jsonl as parts of an HTML page without network, as a picture in characters and as a PNG."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 720, 280
"""Size of a chart in pixels."""
LOSS_TITLE = "loss (nats)"
SINGLE_FIGURES = {
    "learning rate": "learning_rate",
    "gradient norm": "grad_norm",
    "tokens per second": "tokens_per_second",
}
"""Charts of one curve by title."""
LEFT, RIGHT, TOP, BOTTOM = 56, 150, 12, 28
"""Space around its axes."""
COLUMNS, LINES = 64, 12
"""Characters of a terminal's picture."""
MARKS = ".o+x*#@%"
LEVEL_MARK = "-"
COLOURS = 8
"""Colours of the page's style, `--c0` to `--c7`."""
MOST_POINTS = 2000
"""Most points of a curve that are drawn."""
GROWING_POINTS = 512
"""Most points of a curve that grows while it is drawn."""
STYLE = """
:root { --ink: #1d2630; --paper: #fdfdfc; --grid: #dfe3e6; --c0: #9db8d9; --c1: #0b5cad; --c2: #b3470b;
  --c3: #2e8b57; --c4: #8e5bb5; --c5: #b08a1e; --c6: #d0588a; --c7: #3d9aa8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe5ea; --paper: #14181c; --grid: #2e363d; --c0: #4d6f99; --c1: #6cb2ff; --c2: #ff9d5c }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--grid); }
pre { overflow-x: auto; padding: .6rem; border: 1px solid var(--grid); }
svg { max-width: 100%; height: auto; font-size: 12px; fill: var(--ink); }
.grid { stroke: var(--grid); }
.curve { fill: none; stroke-width: 1.8; }
.level { stroke: var(--ink); stroke-dasharray: 2 4; }
"""

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


class GrowingCurve:
    """A curve that gets a value at each step, in bounded memory: a point is the mean over some steps."""

    def __init__(self, most: int = GROWING_POINTS) -> None:
        self._most, self._span = most, 1
        self._parts: dict[int, tuple[float, int, int]] = {}
        """Sum, count and last step of the values by step // span, in the order of the steps."""

    def add(self, step: int, value: float) -> None:
        """Add a value of a later step; one that is not finite leaves a gap."""
        if not math.isfinite(value):
            return
        self._put(value, 1, step)
        while len(self._parts) > self._most:
            self._span *= 2
            parts, self._parts = self._parts, {}
            for part in parts.values():
                self._put(*part)

    def _put(self, total: float, count: int, step: int) -> None:
        before, number, _ = self._parts.get(step // self._span, (0.0, 0, 0))
        self._parts[step // self._span] = before + total, number + count, step

    def go_back(self, step: int) -> None:
        """Forget the points after a step."""
        self._parts = {key: part for key, part in self._parts.items() if part[2] <= step}

    @property
    def points(self) -> Points:
        """Step and mean of each part."""
        return [(float(step), total / count) for total, count, step in self._parts.values()]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sampled_metrics(path: Path, most: int = MOST_POINTS) -> Iterator[dict[str, Any]]:
    """Yield about `most` lines of a metrics.jsonl, evenly spread, and those with held-out figures.

    The others are not parsed. A file that does not exist has no lines; a damaged line is left out.
    """
    with contextlib.suppress(OSError), open(path, "rb") as file:
        size, length = path.stat().st_size, len(file.readline())
        every = max(1, size // max(1, length * most))
        file.seek(0)
        for number, line in enumerate(file):
            if number % every == 0 or b'"eval/' in line:
                with contextlib.suppress(ValueError):
                    yield json.loads(line)


def points_of(records: Iterable[Mapping[str, Any]], figure: str) -> Points:
    """Return (step, value) of each line that has a finite figure."""
    found = ((record["step"], record.get(figure)) for record in records)
    return [(float(step), float(value)) for step, value in found if value is not None]


def run_charts(
    records: Sequence[Mapping[str, Any]], term: str, levels: Mapping[str, tuple[float, float]]
) -> list[Chart]:
    """Return loss and accuracy, training and held out, and the figures of SINGLE_FIGURES over the steps.

    The loss is that of the log. If it is not the loss of the term alone, the term's has a separate chart.

    Args:
        records: lines of metrics.jsonl.
        term: the loss term, whose held-out figures are those of every source.
        levels: loss (nats) and accuracy of other predictors by name.
    """
    sources = dict.fromkeys(name.split("/")[1] for record in records for name in record if name.startswith("eval/"))

    def chart(title: str, trained: str, figure: str, level: int) -> Chart:
        held_out = {name: points_of(records, f"eval/{name}/{figure}") for name in sources}
        curves = {"training": points_of(records, trained), **held_out}
        return Chart(title, curves, {name: values[level] for name, values in levels.items()})

    of_term = chart(LOSS_TITLE, term, f"{term}_loss", 0)
    whole = replace(chart(LOSS_TITLE, "loss", "loss", 0), levels={})
    differs = any(whole.curves.values()) and whole.curves != of_term.curves
    return [
        *([whole, replace(of_term, title=f"{term} {LOSS_TITLE}")] if differs else [of_term]),
        chart("top-1 accuracy", f"{term}_accuracy", f"{term}_accuracy", 1),
        *(Chart(title, {title: points_of(records, figure)}, {}) for title, figure in SINGLE_FIGURES.items()),
    ]


def overlaid(charts: Mapping[str, Sequence[Chart]]) -> list[Chart]:
    """Return the charts of several runs over each other: those of a title together, curves with the run's name."""
    titles = dict.fromkeys(chart.title for of_run in charts.values() for chart in of_run)

    def together(title: str) -> Chart:
        found = ((run, chart) for run, of_run in charts.items() for chart in of_run if chart.title == title)
        curves = {
            run if name == title else f"{run} {name}": points
            for run, chart in found
            for name, points in chart.curves.items()
        }
        return Chart(title, curves, {})

    return [together(title) for title in titles]


def svg(chart: Chart) -> str:
    """Draw a chart as inline SVG; colours come from the page's style."""
    first, last, low, high = chart.bounds
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(step: float, value: float) -> tuple[float, float]:
        return LEFT + across * (step - first) / (last - first), TOP + down * (high - value) / (high - low)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{escape(chart.title)}">']
    for value in ticks(low, high):
        _, y = place(first, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for step in ticks(first, last):
        x, _ = place(step, low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{step:g}</text>')
    labels: list[tuple[float, str]] = []
    for number, (name, points) in enumerate(chart.curves.items()):
        places = [place(*point) for point in thinned(points)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        colour = f'style="stroke: var(--c{number % COLOURS})"'
        parts.append(f'<polyline class="curve" {colour} points="{line}"/>')
        labels += [(places[-1][1], f"{name} {points[-1][1]:.4g}")] if places else []
    for name, value in chart.levels.items():
        _, y = place(first, value)
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        labels.append((y, f"{name} {value:.4g}"))
    y = -math.inf
    for wanted, text in sorted(labels):
        y = max(wanted + 4, y + 14)
        parts.append(f'<text x="{WIDTH - RIGHT + 6}" y="{y:.1f}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>"])


def thinned(points: Points) -> Points:
    """Return at most MOST_POINTS of them, evenly spread, with the last."""
    every = -(-len(points) // MOST_POINTS)
    return points if every <= 1 else [*points[:-1:every], points[-1]]


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return at most `count` round numbers between two."""
    rough = (high - low) / max(1, count - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


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
    shown = {0: high, lines - 1: low}
    picture = [
        f"{f'{shown[number]:.3g}' if number in shown else '':>8} |{''.join(line)}".rstrip()
        for number, line in enumerate(cells)
    ]
    legend = [f"{mark} {name}" for mark, name in zip(MARKS, chart.curves, strict=False)]
    legend += [f"{LEVEL_MARK} {name} ({value:.3g})" for name, value in chart.levels.items()]
    axis = f"{'':>8} +{'-' * columns}"
    steps = f"{'':>9} {f'step {first:.0f}':<{columns - 8}}{f'{last:.0f}':>8}"
    return [f"{'':>9} {chart.title}", *picture, axis, steps, f"{'':>9} {'   '.join(legend)}"]


def write_png(charts: Sequence[Chart], path: Path) -> None:
    """Draw charts below each other with matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3 * len(charts)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
        for name, points in chart.curves.items():
            if points:
                axes.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
        axes.set_title(chart.title, fontsize="medium", loc="left")
        if axes.has_data():
            axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    axes.set_xlabel("step")
    figure.savefig(path, dpi=120)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of plain text."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "\n".join(["<table>", line(head, "th"), *(line(cells, "td") for cells in rows), "</table>"])


def page(title: str, sections: Mapping[str, Sequence[str]]) -> str:
    """Return a complete page: each section a heading and its pieces of HTML. Nothing refers outside of the page."""
    body = [f"<h1>{escape(title)}</h1>"]
    for heading, pieces in sections.items():
        body += [f"<h2>{escape(heading)}</h2>", *pieces]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return "\n".join(["<!doctype html>", f'<html lang="en"><head>{head}</head><body>', *body, "</body></html>", ""])
