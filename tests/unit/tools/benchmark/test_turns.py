"""Sides are processes that take turns; a turn's figures are those of one step, and a side's error is one line."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ctxlm_ds.errors import ConfigError
from tools.benchmark import turns
from tools.benchmark.turns import StepDone, alternate, started

STEP_S = 0.02


@dataclass(frozen=True)
class Sleeps:
    """A side whose steps sleep, and that writes its name into a file in each."""

    name: str
    log: Path

    def run(self, step_done: StepDone) -> None:
        while True:
            time.sleep(STEP_S)
            with open(self.log, "a") as log:
                log.write(self.name)
            step_done()


@dataclass(frozen=True)
class Fails:
    """A side that ends before its first step."""

    error: Exception | None

    def run(self, step_done: StepDone) -> None:
        if self.error is None:
            os._exit(7)
        raise self.error


def test_sides_alternate_and_their_figures_are_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SHORTEST_TURN_S", 0.0)
    log = tmp_path / "log"
    with started({"a": Sleeps("a", log), "b": Sleeps("b", log)}) as sides:
        alternate(sides, rounds=2, least_steps=3)
        facts = sides["a"].facts()
    assert log.read_text() == "ab" + "ab" + "aaabbb" * 2, "first steps, a step that does not count, two rounds"
    assert [len(side.turns) for side in sides.values()] == [2, 2]
    for turn in sides["a"].turns:
        assert STEP_S <= turn.seconds < 20 * STEP_S
        assert turn.cpu_seconds < turn.seconds and turn.page_faults >= 0
    assert sides["a"].first_step_s > STEP_S
    assert 1e6 < facts.peak_bytes < 4e9 and facts.calls is None


def test_short_steps_make_longer_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SHORTEST_TURN_S", 3 * STEP_S)
    with started({"a": Sleeps("a", tmp_path / "log")}) as sides:
        assert 1 <= sides["a"].steps_in(3 * STEP_S) <= 3 and sides["a"].turns == []


@pytest.mark.parametrize(("error", "raised", "told"), [
    (ConfigError("no such thing"), ConfigError, "no such thing"),
    (ValueError("wrong"), RuntimeError, "in run"),  # with its traceback
    (None, ConfigError, "process of a ended with status 7"),
])  # fmt: skip
def test_the_end_of_a_side_is_told(error: Exception | None, raised: type[Exception], told: str) -> None:
    with pytest.raises(raised, match=told), started({"a": Fails(error)}):
        pass
