"""Two sides timed in turn: ratios per round do not depend on a machine whose speed drifts."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence


def summary(values: Sequence[float], form: str) -> tuple[str, str]:
    """Return the median, and `smallest to largest`."""
    return form.format(statistics.median(values)), f"{form.format(min(values))} to {form.format(max(values))}"


def compare(
    ours: Callable[[], int], theirs: Callable[[], int], rounds: int, unit: str, peer: str = "transformers"
) -> list[str]:
    """Time both sides alternately, `rounds` times after one round that does not count.

    Each side returns the number of units it processed. Returns a table of units per second: median (smallest to
    largest).
    """
    torch = sys.modules.get("torch")
    speeds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for side, work in zip(speeds, (ours, theirs), strict=True):
            started_s = time.perf_counter()
            units = work()
            if torch is not None and torch.cuda.is_available():
                torch.cuda.synchronize()
            if number > 0:
                side.append(units / (time.perf_counter() - started_s))
    ratios = [a / b for a, b in zip(*speeds, strict=True)]
    rows = (
        ("ctxlm_ds", unit, *summary(speeds[0], "{:,.0f}")),
        (peer, unit, *summary(speeds[1], "{:,.0f}")),
        ("ratio", "", *summary(ratios, "{:.2f}")),
    )
    return [f"{name:<18}{median:>12} {unit:<12}({limits})" for name, unit, median, limits in rows]
