"""Why a start failed: the records of failing ranks, and srun's lines about ranks that could leave none.

The first failing rank is the earliest whose failure does not follow from another's. A rank that was killed before Slurm
ended the others comes first of all, because no peer's failure can kill a rank like that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import strsignal, valid_signals

from ctxlm_ds.apps.cluster.rank_output import OUTPUT_NAME
from ctxlm_ds.errors import EXIT_TRAINING_ERROR, EXIT_USER_ERROR
from ctxlm_ds.process.run_history import read_failures
from ctxlm_ds.process.slurm import expand_numbers

_TASKS = re.compile(r"srun: error: (\S+): tasks? ([\d,\-]+): (.+)")
_NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_SIGNAL_NUMBERS = {"Out Of Memory": 9, **{strsignal(number): int(number) for number in valid_signals()}}
# NCCL's and gloo's watchdogs abort a process whose peers have ended; Slurm ends tasks by 15 and 9.
_PEERS_CANNOT_CAUSE = (9, 11, 7, 4, 8)
_STEP_ENDS = ("Job step aborted", "CANCELLED AT", "Terminating", "forcing job termination")
MOST_LINES = 16
KILLED = "Killed"


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
        own = by_rank.get(failure.rank)
        # srun knows the signal of a killed rank.
        if own is None or (own.error == KILLED and failure.signal is not None):
            by_rank[failure.rank] = failure
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
    return RankFailure(rank, host, None, "", message, consequence=step_ended, signal=number)


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
