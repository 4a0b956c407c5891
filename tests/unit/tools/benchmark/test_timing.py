"""Two sides are timed in turn, and the ratio is that of the same round."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.benchmark import timing


def test_ratios_are_those_of_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that becomes ten times slower in the second round, both sides alike."""
    now_s = 0.0
    turns: list[str] = []

    def side(name: str, seconds: list[float]) -> Callable[[], int]:
        left = iter(seconds)

        def work() -> int:
            nonlocal now_s
            now_s += next(left)
            turns.append(name)
            return 1200

        return work

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now_s)
    ours, theirs, ratio = timing.compare(
        side("ours", [99.0, 1.0, 10.0, 2.0]), side("theirs", [77.0, 2.0, 20.0, 6.0]), 3, "rows/s", "peer"
    )
    assert turns == ["ours", "theirs"] * 4, "and the first round does not count"
    assert ours.split() == ["ctxlm_ds", "600", "rows/s", "(120", "to", "1,200)"]
    assert theirs.split() == ["peer", "200", "rows/s", "(60", "to", "600)"]
    assert ratio.split() == ["ratio", "2.00", "(2.00", "to", "3.00)"]
