"""The starts of a run: each one's folder, its srun from the command to the outcome, and whether starts make progress.

A start's folder, RUN/attempts/job-<job>-<restart>-<try>, holds start.json from its beginning. Its outcome follows from
what the ranks left in the run directory; srun's status comes last. It is an event of RUN/history.jsonl; a start without
one was cut short with the job itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.cluster.job_context import JobContext, JobSettings, JobSignals, log, show
from ctxlm_ds.apps.cluster.rank_output import OUTPUT_NAME, LogFilter, RankFailure, gather_failures, job_log
from ctxlm_ds.apps.cluster.slurm_commands import cancel_steps, named, node_address, show_job, stop_delay_s, time_left_s
from ctxlm_ds.atomic import read_object, write_text
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, list_checkpoints
from ctxlm_ds.console import format_duration
from ctxlm_ds.errors import EXIT_TRAINING_ERROR, EXIT_USER_ERROR, ClusterError
from ctxlm_ds.process.launch import free_port
from ctxlm_ds.process.run_files import update_status
from ctxlm_ds.process.run_history import (
    ATTEMPTS_DIR,
    END,
    FAILURE,
    GIVE_UP,
    JOB_ATTEMPT,
    REQUEUE,
    append_event,
    read_history,
)
from ctxlm_ds.process.run_lock import LOCK_NAME

WAIT_FOR_LOCK_S = 180
POLL_S = 0.5
ANSWER_S = 20.0
LAST_OUTPUT_S = 30.0
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Deadly to a rank that is still importing, and to an srun that has hardly begun.
STOP_SIGNALS = (10, 12, 15)
START_FILE = "start.json"
CANCELLED = "the job has been cancelled"
"""`how` of the FAILURE event of a start whose job was cancelled; its exit status is 0 if the ranks saved first."""


class Outcome(Enum):
    """How a start ended, by what the ranks left in the run directory."""

    COMPLETED = "completed"
    STOPPED = "stopped in order"
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
class Ended:
    """The outcome of one start, its reason, and the exit status to return."""

    outcome: Outcome
    why: str
    exit_status: int

    def describe(self) -> str:
        """Describe the outcome and its reason."""
        return f"{self.outcome.value}: {self.why}"


@dataclass(frozen=True)
class RankStart:
    """A start that is over."""

    record: StartRecord
    ended: Ended
    failures: tuple[RankFailure, ...] = ()  # the first cause first


class RankStarter:
    """Starts the ranks, several times if asked; `on_term` is called when the job gets SIGTERM."""

    def __init__(self, context: JobContext, signals: JobSignals, on_term: Callable[[], None]) -> None:
        self._context = context
        self._signals = signals
        self._on_term = on_term
        self._tries = 0

    def start(self) -> RankStart:
        """Run the ranks to their end and judge it. Raises OSError if the run directory cannot be written."""
        context, signals = self._context, self._signals
        name = f"{JOB_ATTEMPT}{context.job_id}-{context.restarts}-{self._tries}"
        record = begin(context.run_dir, name, context.job_id, context.node_list)
        self._tries += 1
        again = f", restart {context.restarts}" if context.restarts else ""
        log(f"start {name} on {context.node_list}{again}; {record.describe()}")
        if signals:
            return RankStart(record, Ended(Outcome.STOPPED, f"{signals.name} came before the start", 0))
        return self._run(record)

    def _run(self, record: StartRecord) -> RankStart:
        context = self._context
        folder = context.run_dir / ATTEMPTS_DIR / record.name
        first_node = context.nodes[0]
        environ = step_environment(context.environ, record.name)
        if context.environ.get("SLURMD_NODENAME") == first_node:
            # Rank 0 listens here; elsewhere the ranks take the port of the step's id, which another job may have.
            environ.setdefault("MASTER_PORT", str(free_port()))
        if not is_known_host(first_node):
            environ.setdefault("MASTER_ADDR", node_address(first_node))
        # Before the user's own option, which wins.
        wait = ["--wait-for-lock", str(WAIT_FOR_LOCK_S)]
        words = [context.settings.python, "-m", "ctxlm_ds.pretrain", *wait, *context.words]
        before = len(read_history(context.run_dir))
        with LogFilter(folder / OUTPUT_NAME, show) as lines:
            command = srun_command(words, context.settings, *context.task_words)
            status = self.watch(start_srun(command, environ), lines.line)
        if status < 0:
            cancel_steps(context.job_id)
        failures = gather_failures(folder, lines.slurm_lines, lines.held)
        ended = read_outcome(context, before, status, failures, bool(self._signals))
        return RankStart(record, ended, tuple(failures))

    def watch(self, step: subprocess.Popen[str], on_line: Callable[[str], None]) -> int:
        """Return srun's exit status when all its output has been read; negative if a signal ended it.

        `on_line` is called with each line of the output, from one thread.
        """
        reader = threading.Thread(target=_read_lines, args=(step, on_line), name="srun-output", daemon=True)
        reader.start()
        passed_on = 0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = step.wait(POLL_S)
                reader.join(timeout=LAST_OUTPUT_S)
                return status
            if self._signals.count == passed_on:
                continue
            passed_on = self._signals.count
            if self._signals.name == "SIGUSR1":
                self._notice()
            step.send_signal(signal.SIGUSR1)  # every rank saves and stops; srun itself ends at TERM
            if self._signals.name == "SIGTERM":
                self._on_term()

    def _notice(self) -> None:
        """Say how near the time limit is; wait if a short job's notice of it came at its very beginning."""
        left = ""
        with contextlib.suppress(ClusterError):
            job = show_job(self._context.job_id, ANSWER_S)
            delay_s = stop_delay_s(job, time.time())
            if delay_s > 0:
                log(f"notice of the time limit comes early; the ranks get it in {format_duration(delay_s)}")
                self._signals.sleep(delay_s)
            left_s = time_left_s(job, time.time())
            left = f", {format_duration(left_s)} before the time limit" if math.isfinite(left_s) else ""
        log(f"SIGUSR1{left}: the ranks save and stop")


def _read_lines(step: subprocess.Popen[str], on_line: Callable[[str], None]) -> None:
    assert step.stdout is not None
    for line in step.stdout:
        on_line(line.rstrip("\n"))


def read_outcome(
    context: JobContext, history_length: int, status: int, failures: Sequence[RankFailure], asked_to_stop: bool
) -> Ended:
    """Judge a start.

    Args:
        context: the job.
        history_length: events in the run's history when the start began.
        status: srun's exit status; negative if a signal ended srun.
        failures: of its ranks, the first cause first.
        asked_to_stop: the ranks were sent a signal to stop.
    """
    run_dir = context.run_dir
    ends = [event for event in read_history(run_dir)[history_length:] if event["event"] == END]
    if ends and not ends[-1].get("failed", False):
        reason = str(ends[-1].get("reason", ""))
        stopped = Outcome.STOPPED_FOR_GOOD if "SIGINT" in reason else Outcome.STOPPED
        return Ended(Outcome.COMPLETED if ends[-1].get("completed") else stopped, reason, 0)
    if status == 0 and not failures:
        # A full disk has lost the END event.
        done = (newest_checkpoint(run_dir) or 0) >= context.max_steps
        return Ended(Outcome.COMPLETED if done else Outcome.STOPPED, "no end is on record", 0)
    first = failures[0] if failures else None
    exit_status = first.exit_status if first is not None and first.exit_status is not None else abs(status) or 1
    how = f"by signal {-status}" if status < 0 else f"with status {status}"
    why = first.describe() if first is not None else f"srun ended {how}"
    if asked_to_stop and (status < 0 or (first is not None and first.signal in STOP_SIGNALS)):
        return Ended(Outcome.STOPPED, f"asked to stop before it could ({why})", exit_status)
    holder = (read_object(run_dir / LOCK_NAME) or {}).get("job_id")
    if first is not None and first.error == "RunLockedError" and holder == context.job_id:
        return Ended(Outcome.FAILED, f"an earlier start of this job still holds {run_dir}: {why}", exit_status)
    outcomes = {EXIT_USER_ERROR: Outcome.USER_ERROR, EXIT_TRAINING_ERROR: Outcome.TRAINING_ERROR}
    return Ended(outcomes.get(exit_status, Outcome.FAILED), why, exit_status)


def srun_command(words: Sequence[str], settings: JobSettings, *options: str) -> list[str]:
    """Return srun of `words` in the job's allocation, inside the container if there is one."""
    container_options, inside = settings.wrap(words)
    return [
        "srun", "--kill-on-bad-exit=1", "--label", "--export=ALL", *container_options, *settings.srun_options, *options,
        *inside,
    ]  # fmt: skip


def step_environment(environ: Mapping[str, str], attempt: str) -> dict[str, str]:
    """Return the batch script's environment with this start's name, without other launchers' variables."""
    kept = {key: value for key, value in environ.items() if key not in LAUNCHER_VARIABLES}
    kept.update(CTXLM_ATTEMPT=attempt, PYTHONUNBUFFERED="1")
    log = job_log()
    if log is not None:
        # For ctxlm status; the ranks' output goes through srun.
        kept["CTXLM_LOG_FILE"] = log
    if "SLURM_CPUS_PER_TASK" in kept:
        # Since 22.05 a step does not inherit the job's --cpus-per-task.
        kept.setdefault("SRUN_CPUS_PER_TASK", kept["SLURM_CPUS_PER_TASK"])
    return kept


def is_known_host(name: str) -> bool:
    """Return whether a node's name in Slurm is a host's name as well; else the ranks need its address."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def start_srun(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start srun, whose output is text. Raises ClusterError if there is none."""
    try:
        return subprocess.Popen(
            list(command), env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", bufsize=1,
        )  # fmt: skip
    except FileNotFoundError:
        raise ClusterError("srun: not found; Slurm's commands must be in PATH on the compute nodes") from None


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


def finish(run_dir: Path, attempt: StartRecord, event: str, why: str, **details: Any) -> None:
    """Record the outcome of a start: FAILURE or REQUEUE."""
    how, stopped = details.get("how"), details.get("how") == CANCELLED and not details.get("exit_status")
    append_event(
        run_dir, event, why=why, attempt=attempt.name, job_id=attempt.job_id, checkpoint_before=attempt.checkpoint_step,
        checkpoint_after=newest_checkpoint(run_dir), **details,
    )  # fmt: skip
    state = "queued" if event == REQUEUE else "stopped" if stopped else "failed"
    failure = {"last_failure": why} if state == "failed" else {}
    update_status(run_dir, state=state, why=f"{how}: {why}" if how else why, left_s=None, **failure)


def list_starts(run_dir: Path) -> list[StartRecord]:
    """Return the starts with an intact record, oldest first."""
    found, known = [], {field.name for field in fields(StartRecord)}
    for path in (run_dir / ATTEMPTS_DIR).glob(f"job-*/{START_FILE}"):
        values = {name: value for name, value in (read_object(path) or {}).items() if name in known}
        if len(values) == len(known) and isinstance(values["time_unix_s"], (int, float)):
            found.append(StartRecord(**values))
    return sorted(found, key=lambda attempt: attempt.time_unix_s)


def cut_short(run_dir: Path, job_id: str) -> list[StartRecord]:
    """Return the starts of a job that have no outcome, oldest first: Slurm ended the job with them."""
    events = read_history(run_dir)
    over = {event.get("attempt") for event in events if event["event"] in (FAILURE, REQUEUE) or event.get("completed")}
    return [attempt for attempt in list_starts(run_dir) if attempt.job_id == job_id and attempt.name not in over]


def note_cut_short(run_dir: Path, attempt: StartRecord) -> str:
    """Record the outcome of a start whose job could not do so, and return the reason."""
    ends = [event for event in read_history(run_dir) if event["event"] == END and event.get("attempt") == attempt.name]
    if ends and not ends[-1].get("failed", False):
        why = str(ends[-1].get("reason"))
        finish(run_dir, attempt, REQUEUE, why, how="Slurm ended the job")
    else:
        why = "node failure or kill of the job"
        finish(run_dir, attempt, FAILURE, why, exit_status=None, first_rank=None)
    return why


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
