"""What the ranks of a start left: their output, filtered into the job's one readable log, and why they failed.

Rank 0's lines are unchanged, other ranks' warnings and errors come once each, and a file of the start has everything.
The last lines of dying ranks are held back for the report, whose end is the first failing rank: the earliest with a
failure that does not follow from another's. A rank that was killed before Slurm ended the others comes first of all,
because no peer's failure can kill a rank like that.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from signal import strsignal, valid_signals

from ctxlm_ds.errors import EXIT_TRAINING_ERROR, EXIT_UNEXPECTED, EXIT_USER_ERROR
from ctxlm_ds.process.failure import NODE, FailureRecord, read_failures, shortened
from ctxlm_ds.process.slurm import expand_numbers

OUTPUT_NAME = "output.log"
MOST_HELD_LINES = 400
_LABELLED = re.compile(r"\s*(\d+): (.*)", re.DOTALL)
_LOGGED = re.compile(r"\d\d:\d\d:\d\d ")
_TAGGED = re.compile(r"(\d\d:\d\d:\d\d )?\[rank \d+\] (.*)", re.DOTALL)
_NUMBERS = re.compile(r"\d+")
_SLURM = re.compile(r"(?:srun|slurmstepd)\b[^: ]*: ")
_NOISE = ("_step_signal: ", "Force Terminated", "forcing job termination", "got SIGCONT", "Job step aborted")
_FATAL = "Fatal Python error: "
_ENDS = ("Traceback (most recent call last):", _FATAL)
_TASKS = re.compile(r"srun: error: (\S+): tasks? ([\d,\-]+): (.+)")
_NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_SIGNAL_NUMBERS = {"Out Of Memory": 9, **{strsignal(number): int(number) for number in valid_signals()}}
# NCCL's and gloo's watchdogs abort a process whose peers have ended; Slurm ends tasks by 15 and 9.
_PEERS_CANNOT_CAUSE = (9, 11, 7, 4, 8)
_STEP_ENDS = ("Job step aborted", "CANCELLED AT", "Terminating", "forcing job termination")
MOST_LINES = 16


class LogFilter:
    """Calls `show` with the lines of the readable log."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._dying: set[int] = set()
        self._seen: set[str] = set()
        self.slurm_lines: list[str] = []
        self.held: dict[int, list[str]] = {}
        """By rank: its traceback, or its message about its end."""

    def read(self, raw_path: Path, lines: Iterable[str]) -> None:
        """Take srun's output, and write every line to `raw_path` unless the disk is full."""
        with contextlib.ExitStack() as stack:
            raw: FileIO | None = None
            try:
                raw = stack.enter_context(open(raw_path, "ab", buffering=0))
            except OSError as error:
                self._show(f"cannot keep all ranks' output in {raw_path}: {error.strerror}")
            for line in lines:
                try:
                    if raw is not None:
                        raw.write(line.encode(errors="replace"))
                except OSError as error:
                    raw = None
                    self._show(f"the ranks' output is not kept from here on: {error.strerror}")
                self._line(line.rstrip("\n"))

    def _line(self, text: str) -> None:
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

    def _rank(self, rank: int, said: str) -> None:
        tagged = _TAGGED.fullmatch(said)
        if said.startswith(_ENDS):
            self._dying.add(rank)
        elif _LOGGED.match(said):
            self._dying.discard(rank)
        if tagged is not None and not tagged[1]:
            # Not from the logger: how the rank ended.
            self._hold(rank, tagged[2])
        elif rank in self._dying:
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


def gather_failures(folder: Path, slurm_lines: Sequence[str], held: Mapping[int, Sequence[str]]) -> list[FailureRecord]:
    """Return all failing ranks of a start, the first cause first.

    They are in the records of its folder, and in the lines of srun and slurmstepd; `held` has the last lines of ranks
    whose records could not be written.
    """
    by_rank = {record.rank: record for record in read_failures(folder)}
    for lost in filter(None, map(_NODE_FAILURE.match, slurm_lines)):
        by_rank.setdefault(NODE, FailureRecord(0.0, NODE, lost[1], EXIT_UNEXPECTED, "", "node failure"))
    step_ended = False
    for line in slurm_lines:
        if (match := _TASKS.match(line)) is None:
            step_ended = step_ended or any(sign in line for sign in _STEP_ENDS)
            continue
        for rank in map(int, expand_numbers(match[2])):
            by_rank.setdefault(rank, _reported(rank, match[1], match[3], held.get(rank, ()), step_ended))
    return sorted(by_rank.values(), key=_order)


def _order(failure: FailureRecord) -> int:
    if failure.rank == NODE:
        return -1
    if failure.consequence:
        return 3
    if failure.signal is None:
        return 1
    return 0 if failure.signal in _PEERS_CANNOT_CAUSE else 2


def _reported(rank: int, host: str, how: str, said: Sequence[str], step_ended: bool) -> FailureRecord:
    if (status := _EXIT_CODE.match(how)) is not None:
        message = said[-1] if said else f"ended with status {status[1]}"
        return FailureRecord(0.0, rank, host, int(status[1]), "", message, "\n".join(said) or None, step_ended)
    name = how.split(" (")[0].strip()
    number = _SIGNAL_NUMBERS.get(name)
    message = f"was killed by signal {number} ({name})" if number else how
    # What a crash in C code printed.
    crash = "\n".join(said) if said and said[0].startswith(_FATAL) else None
    exit_status = 128 + number if number else EXIT_UNEXPECTED
    return FailureRecord(0.0, rank, host, exit_status, "", message, crash, step_ended, number)


def report(failures: Sequence[FailureRecord], folder: Path) -> list[str]:
    """Return the end of the readable log: other ranks in short, where everything is, then the first failing rank."""
    where = f"output of all ranks: {folder / OUTPUT_NAME}"
    if not failures:
        return [where]
    first = failures[0]
    if first.exit_status in (EXIT_USER_ERROR, EXIT_TRAINING_ERROR) and not first.traceback:
        # Ranks without a message end because of this one.
        return [*_others([failure for failure in failures[1:] if failure.error]), where, f"error: {first.message}"]
    told = first.describe() if first.rank == NODE else f"first failing rank: {first.describe()}"
    # The traceback of a rank that lost its peers explains nothing.
    frames = "" if first.consequence else first.traceback or ""
    return [*_others(failures[1:]), where, told, *frames.rstrip().splitlines()]


def _others(failures: Sequence[FailureRecord]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for failure in failures:
        told = shortened(failure.describe())
        groups.setdefault(_NUMBERS.sub("#", told), []).append(told)
    lines = [f"  {one}{f' (and {len(more)} more)' if more else ''}" for one, *more in groups.values()]
    rest = [f"  and {len(lines) - MOST_LINES} other messages"] if len(lines) > MOST_LINES else []
    return ["other failing ranks:", *lines[:MOST_LINES], *rest] if lines else []
