"""Two sides timed in turn: ratios per round do not depend on a machine whose speed drifts."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def summary(values: Sequence[float], form: str) -> tuple[str, str]:
    """Return the median, and `smallest to largest`."""
    return form.format(statistics.median(values)), f"{form.format(min(values))} to {form.format(max(values))}"


@dataclass(frozen=True, slots=True)
class RatioComparison:
    """Units per second of both sides by round."""

    unit: str
    ours: list[float]
    theirs: list[float]
    peer: str = "transformers"
    """Name of the other side."""

    def lines(self) -> list[str]:
        """Return a small table: median (smallest to largest)."""
        ratios = [a / b for a, b in zip(self.ours, self.theirs, strict=True)]
        rows = (
            ("ctxlm_ds", self.ours, "{:,.0f}", self.unit),
            (self.peer, self.theirs, "{:,.0f}", self.unit),
            ("ratio", ratios, "{:.2f}", ""),
        )
        summaries = ((name, *summary(values, form), unit) for name, values, form, unit in rows)
        return [f"{name:<18}{median:>12} {unit:<12}({limits})" for name, median, limits, unit in summaries]


def in_turn(
    ours: Callable[[], int], theirs: Callable[[], int], rounds: int, unit: str, peer: str = "transformers"
) -> RatioComparison:
    """Time both sides alternately, `rounds` times after one round that does not count.

    Each side returns the number of units it processed.
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
    return RatioComparison(unit, *speeds, peer)
