"""Ranks under a watchdog, one run for each scenario of a test file.

All are started at once, because most of them only wait; each test then looks at its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.process.failure import FailureRecord, read_failures

RANK = Path(__file__).parent / "watched_rank.py"
SHORT = {"start_minutes": 0.02, "step_minutes": 0.02, "save_minutes": 0.1}
LONGER = {"start_minutes": 1, "step_minutes": 0.03, "save_minutes": 0.5}
NONE: dict[str, float | None] = dict.fromkeys(SHORT)
PATIENCE_S = 120
Scenario = tuple[Any, ...]
"""Limits of the watchdog in minutes, then what each rank does."""


@dataclass
class Run:
    """The ranks of one scenario."""

    folder: Path
    ranks: list[subprocess.Popen[str]]

    @property
    def evidence(self) -> Path:
        return self.folder / "run" / "attempts" / "try"

    def text(self, name: str = "stacks.txt") -> str:
        return (self.evidence / name).read_text()

    def record(self) -> FailureRecord:
        (record,) = read_failures(self.evidence)
        return record

    def wait_until_ready(self, rank: int = 0) -> None:
        until((self.folder / f"ready-{rank}").exists)

    def end(self, rank: int = 0) -> tuple[int, str]:
        """Exit status and stderr."""
        said = self.ranks[rank].communicate(timeout=PATIENCE_S)[1]
        return self.ranks[rank].returncode, said


def start(folder: Path, limits: Any, *whats: str) -> Run:
    ranks = []
    for rank, what in enumerate(whats):
        words = [sys.executable, str(RANK), str(folder / "run"), str(rank), str(len(whats)), json.dumps(limits), what]
        environ = {**os.environ, "READY": str(folder / f"ready-{rank}"), "CTXLM_ATTEMPT": "try"}
        ranks.append(subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environ))
    return Run(folder, ranks)


@contextmanager
def running(scenarios: Mapping[str, Scenario], folder_of: Callable[[str], Path]) -> Iterator[dict[str, Run]]:
    """Start every scenario; kill what is left of them."""
    started = {name: start(folder_of(name), *scenario) for name, scenario in scenarios.items()}
    try:
        yield started
    finally:
        for run in started.values():
            for process in run.ranks:
                process.kill()
                process.communicate()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
