"""Curves and tables as parts of an HTML page that needs no network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from ctxlm_ds.recipe.problems import shortened
from ctxlm_ds.training.hooks.curves import Chart, Points, figure_chart, points_of

WIDTH, HEIGHT = 720, 280
"""Size of a chart in pixels."""
SINGLE_FIGURES = ("learning_rate", "grad_norm", "tokens_per_second")
"""Figures with a chart of one curve."""
LEFT, RIGHT, TOP, BOTTOM = 56, 150, 12, 28
"""Space around its axes, at least: labels that need more have more at the right and below."""
LETTER, LINE, LONGEST = 7.5, 14, 80
"""Pixels that a letter and a line of a label take, about, and the most letters of a curve's name."""
COLOURS = 8
STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def run_charts(records: Sequence[Mapping[str, Any]], term: str) -> list[Chart]:
    """Return loss and accuracy, training and held out, and SINGLE_FIGURES over the steps, from lines of metrics.jsonl.

    If the loss has several terms, the first one, `term`, has a separate chart.
    """
    whole = figure_chart("loss (nats)", records, "loss", "loss")
    losses = [whole, figure_chart(f"{term} loss (nats)", records, term, f"{term}_loss")]
    if not any(whole.curves.values()) or whole.curves == losses[1].curves:
        losses = [replace(losses[1], title="loss (nats)")]
    accuracy = figure_chart("top-1 accuracy", records, f"{term}_accuracy", f"{term}_accuracy")
    singles = (Chart(name, {name: points_of(records, name)}) for name in SINGLE_FIGURES)
    return [*losses, accuracy, *singles]


def overlaid(charts: Mapping[str, Sequence[Chart]]) -> list[Chart]:
    """Return the charts of several runs over each other: those of a title together, curves with the run's name."""
    curves: dict[str, dict[str, Points]] = {}
    for run, of_run in charts.items():
        for chart in of_run:
            named = {run if name == chart.title else f"{run} {name}": points for name, points in chart.curves.items()}
            curves.setdefault(chart.title, {}).update(named)
    return [Chart(title, together) for title, together in curves.items()]


def svg(chart: Chart) -> str:
    """Draw a chart as inline SVG; colours come from the page's style."""
    first, last, low, high = chart.bounds
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(step: float, value: float) -> tuple[float, float]:
        return LEFT + across * (step - first) / (last - first), TOP + down * (high - value) / (high - low)

    parts: list[str] = []
    for value in ticks(low, high):
        _, y = place(first, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for step in ticks(first, last):
        x, _ = place(step, low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{step:g}</text>')
    labels: list[tuple[float, str]] = []
    for number, (name, points) in enumerate(chart.curves.items()):
        places = [place(*point) for point in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        colour = f'style="stroke: var(--c{number % COLOURS})"'
        parts.append(f'<polyline class="curve" {colour} points="{line}"/>')
        labels += [(places[-1][1], f"{shortened(name, LONGEST)} {points[-1][1]:.4g}")] if places else []
    x, y = WIDTH - RIGHT + 6, -math.inf
    for wanted, text in sorted(labels):
        y = max(wanted + 4, y + LINE)
        parts.append(f'<text x="{x}" y="{y:.1f}">{escape(text)}</text>')
    width = max(WIDTH, math.ceil(x + LETTER * max((len(text) for _, text in labels), default=0)))
    size = f'viewBox="0 0 {width} {max(HEIGHT, math.ceil(y) + LINE if labels else 0)}" width="{width}"'
    return "\n".join([f'<svg {size} role="img" aria-label="{escape(chart.title)}">', *parts, "</svg>"])


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return at most `count` round numbers between two."""
    rough = (high - low) / max(1, count - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
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
