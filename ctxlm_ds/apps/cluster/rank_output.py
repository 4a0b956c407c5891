"""What the ranks of a start left: their output, filtered into the job's one readable log, and why they failed.

Rank 0's lines are unchanged, other ranks' warnings and errors come once each, and a file of the start has everything.
The last lines of dying ranks are held back for the report, whose end is the first failing rank: the earliest with a
failure that does not follow from another's. A rank that was killed before Slurm ended the others comes first of all,
because no peer's failure can kill a rank like that.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import strsignal, valid_signals
from typing import IO

from ctxlm_ds.errors import EXIT_TRAINING_ERROR, EXIT_USER_ERROR
from ctxlm_ds.process.failure import read_failures
from ctxlm_ds.process.slurm import expand_numbers

OUTPUT_NAME = "output.log"
MOST_HELD_LINES = 400
_LABELLED = re.compile(r"\s*(\d+): (.*)", re.DOTALL)
_TAGGED = re.compile(r"(\d\d:\d\d:\d\d )?\[rank \d+\] (.*)", re.DOTALL)
_NUMBERS = re.compile(r"\d+")
_SLURM = re.compile(r"(?:srun|slurmstepd)\b[^: ]*: ")
_NOISE = ("_step_signal: ", "Force Terminated", "forcing job termination", "got SIGCONT", "Job step aborted")
_TRACEBACK = "Traceback (most recent call last):"
_FATAL = "Fatal Python error: "
_LINKS = ("The above exception was", "During handling of the above exception")
_TASKS = re.compile(r"srun: error: (\S+): tasks? ([\d,\-]+): (.+)")
_NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_SIGNAL_NUMBERS = {"Out Of Memory": 9, **{strsignal(number): int(number) for number in valid_signals()}}
# NCCL's and gloo's watchdogs abort a process whose peers have ended; Slurm ends tasks by 15 and 9.
_PEERS_CANNOT_CAUSE = (9, 11, 7, 4, 8)
_STEP_ENDS = ("Job step aborted", "CANCELLED AT", "Terminating", "forcing job termination")
MOST_LINES = 16


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
        if said.startswith((_TRACEBACK, _FATAL)):
            self._in_frames[rank] = True
            return True
        if rank not in self._in_frames:
            return False
        if self._in_frames[rank]:
            # The first line after the frames is the exception's.
            more = said.startswith(" ") or said.endswith("(most recent call first):")
            self._in_frames[rank] = not said.strip() or more
            return True
        if not said.strip() or said.startswith(_LINKS):
            return True
        del self._in_frames[rank]
        return False


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank, or of a node."""

    rank: int | None  # None if the node itself failed
    host: str
    exit_status: int | None  # None if a signal ended it
    error: str
    message: str
    traceback: str | None = None
    consequence: bool = False  # True if it follows from another rank's failure
    signal: int | None = None

    @property
    def what(self) -> str:
        """Error and message in one line."""
        first_line = (self.message.strip().splitlines() or [""])[0]
        return f"{self.error}: {first_line}" if self.error and first_line else self.error or first_line

    def describe(self) -> str:
        """Rank, host and error in one line."""
        if self.rank is None:
            return f"node {self.host} failed"
        return f"rank {self.rank} on {self.host}{' ' if self.signal else ': '}{self.what}"


def gather_failures(folder: Path, slurm_lines: Sequence[str], held: Mapping[int, Sequence[str]]) -> list[RankFailure]:
    """Return all failing ranks of a start, the first cause first.

    They are in the records of its folder, and in the lines of srun and slurmstepd; `held` has the last lines of ranks
    whose records could not be written.
    """
    by_rank: dict[int | None, RankFailure] = {}
    for record in read_failures(folder):
        values = asdict(record)
        del values["time_unix_s"]
        by_rank[record.rank] = RankFailure(**values)
    for line in slurm_lines:
        lost = _NODE_FAILURE.match(line)
        if lost is not None:
            by_rank.setdefault(None, RankFailure(None, lost[1], None, "", "node failure"))
    for failure in read_srun_lines(slurm_lines, held):
        by_rank.setdefault(failure.rank, failure)
    return sorted(by_rank.values(), key=_order)


def _order(failure: RankFailure) -> int:
    if failure.rank is None:
        return -1
    if failure.consequence:
        return 3
    if failure.signal is None:
        return 1
    return 0 if failure.signal in _PEERS_CANNOT_CAUSE else 2


def read_srun_lines(lines: Sequence[str], held: Mapping[int, Sequence[str]]) -> list[RankFailure]:
    """Return the ranks that srun reports as failed, in its order."""
    found: dict[int, RankFailure] = {}
    step_ended = False
    for line in lines:
        match = _TASKS.match(line)
        if match is None:
            step_ended = step_ended or any(sign in line for sign in _STEP_ENDS)
            continue
        for rank in map(int, expand_numbers(match[2])):
            found.setdefault(rank, _reported(rank, match[1], match[3], held.get(rank, ()), step_ended))
    return list(found.values())


def _reported(rank: int, host: str, how: str, said: Sequence[str], step_ended: bool) -> RankFailure:
    status = _EXIT_CODE.match(how)
    if status is not None:
        message = said[-1] if said else f"ended with status {status[1]}"
        return RankFailure(rank, host, int(status[1]), "", message, "\n".join(said) or None, step_ended)
    name = how.split(" (")[0].strip()
    number = _SIGNAL_NUMBERS.get(name)
    message = f"was killed by signal {number} ({name})" if number else how
    # What a crash in C code printed.
    crash = "\n".join(said) if said and said[0].startswith(_FATAL) else None
    return RankFailure(rank, host, None, "", message, crash, step_ended, number)


def report(failures: Sequence[RankFailure], folder: Path) -> list[str]:
    """Return the end of the readable log: other ranks in short, where everything is, then the first failing rank."""
    where = f"output of all ranks: {folder / OUTPUT_NAME}"
    if not failures:
        return [where]
    first = failures[0]
    if first.exit_status in (EXIT_USER_ERROR, EXIT_TRAINING_ERROR) and not first.traceback:
        # Ranks without a message end because of this one.
        return [*_others([failure for failure in failures[1:] if failure.error]), where, f"error: {first.message}"]
    lines = [*_others(failures[1:]), where]
    lines.append(f"first failing rank: {first.describe()}" if first.rank is not None else first.describe())
    # The traceback of a rank that lost its peers explains nothing.
    return lines if first.consequence or not first.traceback else [*lines, *first.traceback.rstrip().splitlines()]


def _others(failures: Sequence[RankFailure]) -> list[str]:
    groups: dict[str, list[RankFailure]] = {}
    for failure in failures:
        groups.setdefault(re.sub(r"\d+", "#", failure.what), []).append(failure)
    lines = [
        f"  {group[0].describe()[:200]}" + (f" (and {len(group) - 1} more)" if len(group) > 1 else "")
        for group in groups.values()
    ]
    more = [f"  and {len(lines) - MOST_LINES} other messages"] if len(lines) > MOST_LINES else []
    return ["other failing ranks:", *lines[:MOST_LINES], *more] if lines else []
