"""Filters the output of all ranks into the job's one readable log.

Rank 0's lines are unchanged, other ranks' warnings and errors come once each, and a file of the start has everything.
The last lines of dying ranks are held back: rank_failures.py shows the first one's at the end.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

OUTPUT_NAME = "output.log"
MOST_HELD_LINES = 400
_LABELLED = re.compile(r"\s*(\d+): (.*)", re.DOTALL)
_TAGGED = re.compile(r"(\d\d:\d\d:\d\d )?\[rank \d+\] (.*)", re.DOTALL)
_NUMBERS = re.compile(r"\d+")
_SLURM = re.compile(r"(?:srun|slurmstepd)\b[^: ]*: ")
_NOISE = ("_step_signal: ", "Force Terminated", "forcing job termination", "got SIGCONT", "Job step aborted")
_TRACEBACK = "Traceback (most recent call last):"
_LINKS = ("The above exception was", "During handling of the above exception")


def job_log() -> str | None:
    """Return the job's readable log, in the job's process; None if its stdout is no file."""
    path = os.path.realpath("/proc/self/fd/1")
    return path if os.path.isfile(path) else None


class LogFilter:
    """Writes every line to `raw_path`, unless the disk is full, and calls `show` with those of the readable log."""

    def __init__(self, raw_path: Path, show: Callable[[str], None]) -> None:
        self._show = show
        self._raw: IO[str] | None = None
        self._lock = threading.Lock()
        self._in_frames: dict[int, bool] = {}
        self._seen: set[str] = set()
        self.slurm_lines: list[str] = []
        """Lines of srun and slurmstepd, in order."""
        self.held: dict[int, list[str]] = {}
        """By rank: its traceback, or its message about its end."""
        try:
            self._raw = open(raw_path, "a", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115
        except OSError as error:
            show(f"cannot keep all ranks' output in {raw_path}: {error.strerror}")

    def __enter__(self) -> LogFilter:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            raw, self._raw = self._raw, None
            if raw is not None:
                raw.close()

    def line(self, text: str) -> None:
        """Take one line of srun's output."""
        with self._lock:
            self._keep(text)
            labelled = _LABELLED.fullmatch(text)
            rank, said = (int(labelled[1]), labelled[2]) if labelled else (None, text)
            if _SLURM.match(said):
                # Slurm repeats some lines for each node, and some are noise.
                if said not in self.slurm_lines and not any(noise in said for noise in _NOISE):
                    self._show(said)
                self.slurm_lines.append(said)
            elif rank is None:
                self._show(said)
            else:
                self._rank(rank, said)

    def _keep(self, text: str) -> None:
        if self._raw is None:
            return
        try:
            self._raw.write(text + "\n")
        except OSError as error:
            self._raw = None
            self._show(f"the ranks' output is not kept from here on: {error.strerror}")

    def _rank(self, rank: int, said: str) -> None:
        tagged = _TAGGED.fullmatch(said)
        if tagged is not None and not tagged[1]:
            # Not from the logger: how the rank ended.
            self._hold(rank, tagged[2])
        elif tagged is None and self._in_traceback(rank, said):
            self._hold(rank, said)
        elif rank == 0:
            self._show(said)
        elif tagged is not None and (message := _NUMBERS.sub("#", tagged[2])) not in self._seen:
            self._seen.add(message)
            self._show(said)

    def _hold(self, rank: int, said: str) -> None:
        lines = self.held.setdefault(rank, [])
        if len(lines) < MOST_HELD_LINES:
            lines.append(said)

    def _in_traceback(self, rank: int, said: str) -> bool:
        """Return whether a line belongs to a traceback, or to one that is linked to it."""
        if said.startswith(_TRACEBACK):
            self._in_frames[rank] = True
            return True
        if rank not in self._in_frames:
            return False
        if self._in_frames[rank]:
            # The first line after the frames is the exception's.
            self._in_frames[rank] = not said.strip() or said.startswith(" ")
            return True
        if not said.strip() or said.startswith(_LINKS):
            return True
        del self._in_frames[rank]
        return False
