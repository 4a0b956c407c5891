"""Two sides timed in turn, round by round; a ratio is taken round by round, so that a machine whose speed drifts does
not favour one side."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RatioComparison:
    """Units a second of both sides, and their ratio round by round."""

    unit: str
    ours: list[float]
    theirs: list[float]
    peer: str = "transformers"
    """Name of the other side."""

    def lines(self) -> list[str]:
        """A small table: median (smallest, largest)."""
        ratios = [a / b for a, b in zip(self.ours, self.theirs, strict=True)]
        rows = (("ctxlm_ds", self.ours, "{:,.0f}"), (self.peer, self.theirs, "{:,.0f}"), ("ratio", ratios, "{:.2f}"))
        return [
            f"{name:<18}{shown.format(statistics.median(v)):>12} {self.unit if name != 'ratio' else '':<12}"
            f"({shown.format(min(v))} to {shown.format(max(v))})"
            for name, v, shown in rows
        ]


def in_turn(
    ours: Callable[[], int], theirs: Callable[[], int], rounds: int, unit: str, peer: str = "transformers"
) -> RatioComparison:
    """Time both sides one after the other, `rounds` times after one round that is not counted."""
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
