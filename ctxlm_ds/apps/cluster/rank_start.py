"""One start of the ranks, from its folder to the outcome.

Before the first start the nodes are checked and the data is copied to their disks, if
slurm/env.sh asks for it (CTXLM_PREFLIGHT, CTXLM_STAGE_DIR). The outcome follows from what the ranks left in the run
directory; srun's status comes last.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ctxlm_ds.apps.cluster import start_records
from ctxlm_ds.apps.cluster.job_context import JobContext, JobSignals, log, show
from ctxlm_ds.apps.cluster.preflight import run_preflight
from ctxlm_ds.apps.cluster.rank_failures import RankFailure, gather_failures
from ctxlm_ds.apps.cluster.rank_output import OUTPUT_NAME, LogFilter
from ctxlm_ds.apps.cluster.restart_policy import Ended, Outcome, Prepared
from ctxlm_ds.apps.cluster.run_files import read_job_id
from ctxlm_ds.apps.cluster.slurm_commands import cancel_steps, node_address, show_job, stop_delay_s, time_left_s
from ctxlm_ds.apps.cluster.srun import SrunStep, free_port, is_known_host, rank_python, srun_command, step_environment
from ctxlm_ds.apps.cluster.staging import run_staging
from ctxlm_ds.apps.cluster.start_records import StartRecord, newest_checkpoint
from ctxlm_ds.console import format_duration
from ctxlm_ds.errors import EXIT_TRAINING_ERROR, EXIT_USER_ERROR, ClusterError, ConfigError
from ctxlm_ds.process.run_history import ATTEMPTS_DIR, END, JOB_ATTEMPT, read_history
from ctxlm_ds.process.run_lock import LOCK_NAME

WAIT_FOR_LOCK_S = 180
POLL_S = 0.5
ANSWER_S = 20.0
# Deadly to a rank that is still importing, and to an srun that has hardly begun.
STOP_SIGNALS = (10, 12, 15)


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
        self._prepared: Prepared | None = None

    @property
    def nodes(self) -> list[str]:
        """Nodes that the ranks run on, rank 0's first."""
        left_out = self._prepared.left_out if self._prepared is not None else ()
        return [node for node in self._context.tasks if node not in left_out]

    @property
    def exclude(self) -> tuple[str, ...]:
        """Nodes to avoid when the job is put back."""
        return self._prepared.exclude if self._prepared is not None else ()

    def start(self) -> RankStart:
        """Run the ranks to their end and judge it. Raises OSError if the run directory cannot be written."""
        context, signals = self._context, self._signals
        name = f"{JOB_ATTEMPT}{context.job_id}-{context.restarts}-{self._tries}"
        record = start_records.begin(context.run_dir, name, context.chain, context.job_id, context.node_list)
        self._tries += 1
        again = f", restart {context.restarts}" if context.restarts else ""
        log(f"start {name} on {context.node_list}{again}; {record.describe()}")
        if self._prepared is None:
            self._prepared = prepare(context, name, lambda: bool(signals))
        if self._prepared.ended is not None:
            return RankStart(record, self._prepared.ended)
        if signals:
            return RankStart(record, Ended(Outcome.STOPPED, f"{signals.name} came before the start", 0))
        return self._run(record, self._prepared)

    def _run(self, record: StartRecord, prepared: Prepared) -> RankStart:
        context = self._context
        folder = context.run_dir / ATTEMPTS_DIR / record.name
        first_node = self.nodes[0]
        port = free_port(context.environ, first_node, self._tries)
        environ = step_environment(context.environ, record.name, port)
        if not is_known_host(first_node):
            environ.setdefault("MASTER_ADDR", node_address(first_node))
        # Before the user's own option, which wins.
        words = [rank_python(context.settings), "-m", "ctxlm_ds.pretrain", "--wait-for-lock", str(WAIT_FOR_LOCK_S)]
        words += [*context.words, *(["--set", *prepared.settings] if prepared.settings else [])]
        before = len(read_history(context.run_dir))
        with LogFilter(folder / OUTPUT_NAME, show) as lines:
            command = srun_command(words, context.settings, *prepared.srun_words)
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
    holder = read_job_id(run_dir / LOCK_NAME)
    if first is not None and first.error == "RunLockedError" and holder in (context.job_id, context.chain):
        return Ended(Outcome.FAILED, f"an earlier start of this job still holds {run_dir}: {why}", exit_status)
    outcomes = {EXIT_USER_ERROR: Outcome.USER_ERROR, EXIT_TRAINING_ERROR: Outcome.TRAINING_ERROR}
    return Ended(outcomes.get(exit_status, Outcome.FAILED), why, exit_status)


def prepare(context: JobContext, attempt_name: str, should_stop: Callable[[], bool]) -> Prepared:
    """Check nodes and copy data, as far as the settings ask for it.

    An impossible setting is an end like any other: on record, and no successor repeats it.
    """
    prepared = Prepared(srun_words=context.task_words)
    environ = step_environment(context.environ, attempt_name, None)
    if environ.get("CTXLM_PREFLIGHT", "0") not in ("", "0", "no", "false", "off"):
        try:
            prepared = run_preflight(context, attempt_name, environ, should_stop)
        except ConfigError as error:
            return Prepared(Ended(Outcome.USER_ERROR, str(error), EXIT_USER_ERROR))
    if prepared.ended is None and environ.get("CTXLM_STAGE_DIR"):
        nodes = [node for node in context.tasks if node not in prepared.left_out]
        return replace(prepared, settings=tuple(run_staging(context, nodes, environ, should_stop)))
    return prepared
