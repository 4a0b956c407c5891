"""One start of the ranks, from its folder to the outcome: srun's command and environment, its output, and signals.

The outcome follows from what the ranks left in the run directory; srun's status comes last.
"""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ctxlm_ds.apps.cluster import start_records
from ctxlm_ds.apps.cluster.job_context import JobContext, JobSettings, JobSignals, log, show
from ctxlm_ds.apps.cluster.rank_output import OUTPUT_NAME, LogFilter, RankFailure, gather_failures, job_log
from ctxlm_ds.apps.cluster.slurm_commands import cancel_steps, node_address, show_job, stop_delay_s, time_left_s
from ctxlm_ds.apps.cluster.start_records import StartRecord, newest_checkpoint
from ctxlm_ds.atomic import read_object
from ctxlm_ds.console import format_duration
from ctxlm_ds.errors import EXIT_TRAINING_ERROR, EXIT_USER_ERROR, ClusterError
from ctxlm_ds.process.run_history import ATTEMPTS_DIR, END, JOB_ATTEMPT, read_history
from ctxlm_ds.process.run_lock import LOCK_NAME
from ctxlm_ds.process.slurm import FIRST_PORT, NUM_PORTS

WAIT_FOR_LOCK_S = 180
POLL_S = 0.5
ANSWER_S = 20.0
LAST_OUTPUT_S = 30.0
PORTS_TO_TRY, PORT_STRIDE = 50, 37
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Deadly to a rank that is still importing, and to an srun that has hardly begun.
STOP_SIGNALS = (10, 12, 15)


class Outcome(Enum):
    """How a start ended, by what the ranks left in the run directory."""

    COMPLETED = "completed"
    STOPPED = "stopped in order"
    STOPPED_FOR_GOOD = "stopped by an interrupt"
    USER_ERROR = "a user's error"
    TRAINING_ERROR = "a training error"
    FAILED = "failed"


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
        record = start_records.begin(context.run_dir, name, context.job_id, context.node_list)
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
        port = free_port(context.environ, first_node, self._tries)
        environ = step_environment(context.environ, record.name, port)
        if not is_known_host(first_node):
            environ.setdefault("MASTER_ADDR", node_address(first_node))
        # Before the user's own option, which wins.
        wait = ["--wait-for-lock", str(WAIT_FOR_LOCK_S)]
        words = [context.settings.python, "-m", "ctxlm_ds.pretrain", *wait, *context.words]
        before = len(read_history(context.run_dir))
        with LogFilter(folder / OUTPUT_NAME, show) as lines:
            command = srun_command(words, context.settings, *context.task_words)
            status = self._watch(SrunStep(command, environ, lines.line))
        if status < 0:
            cancel_steps(context.job_id)
        failures = gather_failures(folder, lines.slurm_lines, lines.held)
        ended = read_outcome(context, before, status, failures, bool(self._signals))
        return RankStart(record, ended, tuple(failures))

    def _watch(self, step: SrunStep) -> int:
        passed_on = 0
        while (status := step.wait(POLL_S)) is None:
            if self._signals.count == passed_on:
                continue
            passed_on = self._signals.count
            if self._signals.name == "SIGUSR1":
                self._notice()
            step.stop_in_order()
            if self._signals.name == "SIGTERM":
                self._on_term()
        return status

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


def step_environment(environ: Mapping[str, str], attempt: str, port: int | None) -> dict[str, str]:
    """Return the batch script's environment for the ranks: without other launchers' variables, with this start's name.

    `port` is where rank 0 listens; None leaves the choice to the ranks or to slurm/env.sh.
    """
    kept = {key: value for key, value in environ.items() if key not in LAUNCHER_VARIABLES}
    kept.update(CTXLM_ATTEMPT=attempt, PYTHONUNBUFFERED="1")
    log = job_log()
    if log is not None:
        # For ctxlm status; the ranks' output goes through srun.
        kept["CTXLM_LOG_FILE"] = log
    if "SLURM_CPUS_PER_TASK" in kept:
        # Since 22.05 a step does not inherit the job's --cpus-per-task.
        kept.setdefault("SRUN_CPUS_PER_TASK", kept["SLURM_CPUS_PER_TASK"])
    if port is not None:
        kept.setdefault("MASTER_PORT", str(port))
    return kept


def free_port(environ: Mapping[str, str], first_node: str, try_number: int) -> int | None:
    """Return a port that is free here, different for neighbouring jobs, restarts and tries.

    None if this is not the host of rank 0 (`first_node`); the ranks then use the step's id.
    """
    if environ.get("SLURMD_NODENAME") != first_node:
        return None
    start = int(environ["SLURM_JOB_ID"]) * 101 + int(environ.get("SLURM_RESTART_COUNT") or "0") + try_number * 7
    for offset in range(PORTS_TO_TRY):
        port = FIRST_PORT + (start + offset * PORT_STRIDE) % NUM_PORTS
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port
    return None


def is_known_host(name: str) -> bool:
    """Return whether a node's name in Slurm is a host's name as well; else the ranks need its address."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


class SrunStep:
    """A running srun; `on_line` is called with each line of its output, from one thread."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], on_line: Callable[[str], None]) -> None:
        try:
            self._process = subprocess.Popen(
                list(command), env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", bufsize=1,
            )  # fmt: skip
        except FileNotFoundError:
            raise ClusterError("srun: not found; Slurm's commands must be in PATH on the compute nodes") from None
        self._reader = threading.Thread(target=self._read, args=(on_line,), name="srun-output", daemon=True)
        self._reader.start()

    def _read(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            on_line(line.rstrip("\n"))

    def stop_in_order(self) -> None:
        """Let every rank save and stop, by USR1, because srun itself ends at TERM."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)

    def wait(self, timeout_s: float) -> int | None:
        """Return srun's exit status when all its output has been read (negative: a signal); None if it still runs."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(timeout=LAST_OUTPUT_S)
        return status
