"""The starts of a run: each one's folder, its srun from the command to the outcome, and whether starts make progress.

A start's folder, RUN/attempts/job-<job>-<restart>-<try>, holds start.json from its beginning. Its outcome follows from
what the ranks left in the run directory; srun's status comes last. It is an event of RUN/history.jsonl; a start without
one was cut short with the job itself.

The ranks' output is filtered into the job's one readable log: rank 0's lines are unchanged, other ranks' warnings and
errors come once each, and a file of the start has everything. The last lines of dying ranks are held back for the
report, whose end is the first failing rank: the earliest with a failure that does not follow from another's. A rank
that was killed before Slurm ended the others comes first of all, because no peer's failure can kill a rank like that.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from io import FileIO
from pathlib import Path
from signal import strsignal, valid_signals
from typing import Any

from ctxlm_ds.apps.cluster.job_context import JobContext, JobSettings
from ctxlm_ds.apps.cluster.slurm_commands import insist, named, parse_fields
from ctxlm_ds.atomic import read_object, write_text
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, list_checkpoints
from ctxlm_ds.errors import EXIT_TRAINING_ERROR, EXIT_UNEXPECTED, EXIT_USER_ERROR
from ctxlm_ds.process.failure import NODE, FailureRecord, read_failures, shortened
from ctxlm_ds.process.launch import free_port
from ctxlm_ds.process.run_files import read_value, update_status
from ctxlm_ds.process.run_history import ATTEMPTS_DIR, END, FAILURE, GIVE_UP, REQUEUE, append_event, read_history
from ctxlm_ds.process.run_lock import LOCK_NAME
from ctxlm_ds.process.slurm import expand_numbers

# Deadly to a rank that is still importing, and to an srun that has hardly begun.
STOP_SIGNALS = (10, 12, 15)
START_FILE = "start.json"
CANCELLED = "the job has been cancelled"
"""`how` of the FAILURE event of a start whose job was cancelled; its exit status is 0 if the ranks saved first."""
CUT_SHORT = "cut_short"  # event: Slurm is about to kill the ranks of a start: why, attempt
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


class Outcome(Enum):
    """How a start ended, by what the ranks left in the run directory."""

    COMPLETED = "completed"
    STOPPED = "stopped as asked"
    STOPPED_FOR_GOOD = "stopped by an interrupt"
    USER_ERROR = "a user's error"
    TRAINING_ERROR = "a training error"
    FAILED = "failed"


@dataclass(frozen=True)
class StartRecord:
    """One start of the ranks, as its start.json holds it."""

    name: str
    job_id: str
    time_unix_s: float
    checkpoint_step: int | None  # newest checkpoint at the beginning; None if there was none
    nodes: str

    def describe(self) -> str:
        """Describe the checkpoint that the start begins at."""
        step = self.checkpoint_step
        return "no checkpoint yet" if step is None else f"newest checkpoint: step {step}"


@dataclass(frozen=True)
class RankStart:
    """A start that is over."""

    record: StartRecord
    outcome: Outcome
    why: str
    exit_status: int
    failures: Sequence[FailureRecord] = ()  # the first cause first

    def describe(self) -> str:
        return f"{self.outcome.value}: {self.why}"


def ends_of(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of ends, without those of phases after which a start continued."""
    return [event for event in events if event["event"] == END and not event.get("phase_over")]


def read_outcome(
    context: JobContext, history_length: int, status: int, failures: Sequence[FailureRecord], asked_to_stop: bool
) -> tuple[Outcome, str, int]:
    """Return the outcome of a start, its reason, and the exit status to return.

    The run's history had `history_length` events when the start began; `status` is srun's, negative if a signal ended
    srun; `asked_to_stop` says that the ranks were sent a signal.
    """
    run_dir, first = context.run_dir, next(iter(failures), None)
    ends = ends_of(read_history(run_dir)[history_length:])
    if ends and not ends[-1].get("failed", False):
        reason = str(ends[-1].get("reason", ""))
        stopped = Outcome.STOPPED_FOR_GOOD if "SIGINT" in reason else Outcome.STOPPED
        return Outcome.COMPLETED if ends[-1].get("completed") else stopped, reason, 0
    if status == 0 and first is None:
        # A full disk has lost the END event.
        done = (newest_checkpoint(run_dir) or 0) >= context.max_steps
        return Outcome.COMPLETED if done else Outcome.STOPPED, "no end is on record", 0
    exit_status, why = abs(status), f"srun ended {f'by signal {-status}' if status < 0 else f'with status {status}'}"
    if first is not None:
        exit_status, why = first.exit_status, first.describe()
    if asked_to_stop and (status < 0 or (first is not None and first.signal in STOP_SIGNALS)):
        return Outcome.STOPPED, f"asked to stop before it could ({why})", exit_status
    holder = (read_object(run_dir / LOCK_NAME) or {}).get("job_id")
    if first is not None and first.error == "RunLockedError" and holder == named(context.job_id):
        return Outcome.FAILED, f"an earlier start of this job still holds {run_dir}: {why}", exit_status
    outcomes = {EXIT_USER_ERROR: Outcome.USER_ERROR, EXIT_TRAINING_ERROR: Outcome.TRAINING_ERROR}
    return outcomes.get(exit_status, Outcome.FAILED), why, exit_status


def srun_command(words: Sequence[str], settings: JobSettings, *options: str) -> list[str]:
    """Return srun of `words` in the job's allocation, inside the container if there is one."""
    return [
        "srun", "--kill-on-bad-exit=1", "--label", "--export=ALL", *settings.of_srun, *settings.srun_options, *options,
        *settings.inside, *words,
    ]  # fmt: skip


def step_environment(environ: Mapping[str, str], attempt: str, first_node: str) -> dict[str, str]:
    """Return the batch script's environment with this start's name, and where rank 0 listens."""
    kept = {**environ, "CTXLM_ATTEMPT": attempt, "PYTHONUNBUFFERED": "1"}
    if (path := job_log()) is not None:
        # For ctxlm status; the ranks' output goes through srun.
        kept["CTXLM_LOG_FILE"] = path
    if "SLURM_CPUS_PER_TASK" in kept:
        # Since 22.05 a step does not inherit the job's --cpus-per-task.
        kept.setdefault("SRUN_CPUS_PER_TASK", kept["SLURM_CPUS_PER_TASK"])
    if environ.get("SLURMD_NODENAME") == first_node:
        # Elsewhere the ranks take the port of the step's id, which another job may have.
        kept.setdefault("MASTER_PORT", str(free_port()))
    if not is_known_host(first_node):
        address = parse_fields(insist(["scontrol", "show", "node", first_node])).get("NodeAddr", "")
        kept.setdefault("MASTER_ADDR", address or first_node)
    return kept


def job_log() -> str | None:
    """Return the job's readable log, in the job's process; None if its stdout is no file."""
    path = os.path.realpath("/proc/self/fd/1")
    return path if os.path.isfile(path) else None


def is_known_host(name: str) -> bool:
    """Return whether a node's name in Slurm is a host's name as well; else the ranks need its address."""
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(name, None))
    return False


def start_srun(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(command), env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", bufsize=1,
    )  # fmt: skip


def newest_checkpoint(run_dir: Path) -> int | None:
    """Return the step of the newest complete checkpoint; whether it is intact is checked when it is loaded."""
    return max(list_checkpoints(run_dir / CHECKPOINTS_DIR), default=None)


def begin(run_dir: Path, name: str, job_id: str, nodes: str) -> StartRecord:
    """Make a start's folder. Raises OSError if the run directory cannot be written."""
    attempt = StartRecord(name, job_id, round(time.time(), 6), newest_checkpoint(run_dir), nodes)
    folder = run_dir / ATTEMPTS_DIR / name
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / START_FILE, json.dumps(asdict(attempt), indent=1) + "\n")
    update_status(run_dir, state="starting", why=None, job_id=named(job_id), attempt=name, log=job_log(), left_s=None)
    return attempt


def finish(run_dir: Path, attempt: StartRecord, event: str, why: str, how: str | None = None, **details: Any) -> None:
    """Record the outcome of a start: FAILURE or REQUEUE."""
    details |= {} if how is None else {"how": how}
    append_event(
        run_dir, event, why=why, attempt=attempt.name, job_id=attempt.job_id, checkpoint_before=attempt.checkpoint_step,
        checkpoint_after=newest_checkpoint(run_dir), **details,
    )  # fmt: skip
    stopped = how == CANCELLED and not details.get("exit_status")
    state = "queued" if event == REQUEUE else "stopped" if stopped else "failed"
    failure = {"last_failure": why} if state == "failed" else {}
    update_status(run_dir, state=state, why=f"{how}: {why}" if how else why, left_s=None, **failure)


def list_starts(run_dir: Path) -> list[StartRecord]:
    """Return the starts with an intact record, oldest first."""
    found, known = [], {field.name for field in fields(StartRecord)}
    for path in (run_dir / ATTEMPTS_DIR).glob(f"job-*/{START_FILE}"):
        values = {name: value for name, value in (read_object(path) or {}).items() if name in known}
        texts = [read_value(values, name, str) for name in ("name", "job_id", "nodes")]
        if len(values) == len(known) and None not in (*texts, read_value(values, "time_unix_s", float)):
            found.append(StartRecord(**values))
    return sorted(found, key=lambda attempt: attempt.time_unix_s)


def note_cut_short(run_dir: Path, job_id: str) -> Iterator[str]:
    """Record the outcome of a job's starts that have none, because Slurm ended the job with them; yield a line each."""
    events = read_history(run_dir)
    ended = [event for event in events if event["event"] in (FAILURE, REQUEUE) or event.get("completed")]
    over = {str(event.get("attempt")) for event in ended}
    for attempt in list_starts(run_dir):
        if attempt.job_id != job_id or attempt.name in over:
            continue
        ends = [event for event in ends_of(events) if event.get("attempt") == attempt.name]
        if ends and not ends[-1].get("failed", False):
            why = str(ends[-1].get("reason"))
            finish(run_dir, attempt, REQUEUE, why, how="Slurm ended the job")
        else:
            told = [event for event in events if event["event"] == CUT_SHORT and event.get("attempt") == attempt.name]
            why = str(told[-1].get("why")) if told else "node failure or kill of the job"
            finish(run_dir, attempt, FAILURE, why, exit_status=None, first_rank=None)
        yield f"start {attempt.name} on {attempt.nodes} ended with its job: {why}"


def fruitless_starts(run_dir: Path, attempt: StartRecord) -> list[dict[str, Any]]:
    """Return the starts in a row before this one that left no new checkpoint, oldest first; none if this one left one.

    Counted over all starts of a job, for any end, and from zero after the job gave up.
    """
    newest = newest_checkpoint(run_dir)
    found: dict[str, dict[str, Any]] = {}
    for event in reversed(read_history(run_dir)):
        if event.get("job_id") != attempt.job_id or event["event"] not in (FAILURE, REQUEUE, GIVE_UP):
            continue
        moved = event.get("checkpoint_before") != newest or event.get("checkpoint_after") != newest
        if event["event"] == GIVE_UP or moved:
            break
        found.setdefault(str(event.get("attempt")), event)
    return [] if attempt.checkpoint_step != newest else list(found.values())[::-1]


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
