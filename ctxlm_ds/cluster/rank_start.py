"""One start of the ranks, from its folder to the verdict on its end.

In: a JobContext. Out: RankStart. Before the first start the nodes are checked and the data is copied to their disks, if
slurm/env.sh asks for it (CTXLM_PREFLIGHT, CTXLM_STAGE_DIR). The verdict goes by what the ranks left in the run
directory; srun's status is the last to be asked. Not here: what follows from it (job.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ctxlm_ds.cluster import start_records
from ctxlm_ds.cluster.start_records import Attempt, newest_checkpoint
from ctxlm_ds.cluster.slurm_commands import cancel_steps, node_address, show_job
from ctxlm_ds.cluster.job_context import JobContext, show, tell
from ctxlm_ds.cluster.restart_policy import Ended, Outcome, Prepared
from ctxlm_ds.cluster.rank_failures import RankFailure, gather_failures
from ctxlm_ds.cluster.rank_output import OUTPUT_NAME, LogFilter
from ctxlm_ds.cluster.signals import Notices, stop_delay_s
from ctxlm_ds.cluster.preflight import run_preflight
from ctxlm_ds.cluster.run_files import read_job_id
from ctxlm_ds.cluster.staging import run_staging
from ctxlm_ds.cluster.srun import SrunStep, free_port, is_known_host, rank_python, srun_command, step_environment
from ctxlm_ds.console import format_duration
from ctxlm_ds.errors import EXIT_TRAINING_ERROR, EXIT_USER_ERROR, ClusterError, ConfigError
from ctxlm_ds.process.run_history import ATTEMPTS_DIR, END, read_history
from ctxlm_ds.process.run_lock import LOCK_NAME

WAIT_FOR_LOCK_S = 180
POLL_S = 0.5
ANSWER_S = 20.0
# Deadly to a rank that is still importing, and to an srun that has hardly begun.
STOP_SIGNALS = (10, 12, 15)


@dataclass(frozen=True)
class RankStart:
    """A start that is over."""

    attempt: Attempt
    ended: Ended
    failures: tuple[RankFailure, ...] = ()
    """The first cause first."""


class RankStarter:
    """Starts the ranks, as often as it is asked.

    Args:
        context: the job.
        notices: signals to it.
        on_term: called when SIGTERM has come.
    """

    def __init__(self, context: JobContext, notices: Notices, on_term: Callable[[], None]) -> None:
        self._context = context
        self._notices = notices
        self._on_term = on_term
        self._tries = 0
        self._prepared: Prepared | None = None  # what was found before the first start in this allocation

    @property
    def nodes(self) -> list[str]:
        """Nodes that the ranks run on, rank 0's first."""
        left_out = self._prepared.left_out if self._prepared is not None else ()
        return [node for node in self._context.tasks if node not in left_out]

    @property
    def exclude(self) -> tuple[str, ...]:
        """Nodes to keep away from when the job is put back."""
        return self._prepared.exclude if self._prepared is not None else ()

    def start(self) -> RankStart:
        """Run the ranks to their end and judge it.

        Raises:
            ClusterError: srun is missing.
            OSError: the run directory cannot be written.
        """
        context, notices = self._context, self._notices
        name = f"job-{context.job_id}-{context.restarts}-{self._tries}"
        attempt = start_records.begin(context.run_dir, name, context.chain, context.job_id, context.node_list)
        self._tries += 1
        again = f", restart {context.restarts}" if context.restarts else ""
        tell(f"start {name} on {context.node_list}{again}; {attempt.in_words()}")
        if self._prepared is None:
            self._prepared = prepare(context, name, lambda: bool(notices))
        if self._prepared.ended is not None:
            return RankStart(attempt, self._prepared.ended)
        if notices:
            return RankStart(attempt, Ended(Outcome.STOPPED, f"{notices.name} came before the start", 0))
        return self._run(attempt, self._prepared)

    def _run(self, attempt: Attempt, prepared: Prepared) -> RankStart:
        context = self._context
        folder = context.run_dir / ATTEMPTS_DIR / attempt.name
        first_node = self.nodes[0]
        port = free_port(context.environ, first_node, self._tries)
        environ = step_environment(context.environ, attempt.name, port)
        if not is_known_host(first_node):
            environ.setdefault("MASTER_ADDR", node_address(first_node))
        # First, so that the user's own comes after it and counts.
        words = [rank_python(context.settings), "-m", "ctxlm_ds.pretrain", "--wait-for-lock", str(WAIT_FOR_LOCK_S)]
        words += context.words
        words += ["--set", *prepared.settings] if prepared.settings else []
        before = len(read_history(context.run_dir))
        with LogFilter(folder / OUTPUT_NAME, show) as lines:
            command = srun_command(words, context.settings, *prepared.srun_words)
            status = self._watch(SrunStep(command, environ, lines.line))
        if status < 0:
            cancel_steps(context.job_id)
        failures = gather_failures(folder, lines.slurm_lines, lines.held)
        job_ids = (context.job_id, context.chain)
        ended = read_outcome(
            context.run_dir, before, status, failures, context.run_folder.max_steps, job_ids, bool(self._notices)
        )
        return RankStart(attempt, ended, tuple(failures))

    def _watch(self, step: SrunStep) -> int:
        """Wait for srun's end, letting the ranks stop when the job is told to; its status."""
        told = 0
        while (status := step.wait(POLL_S)) is None:
            if self._notices.count == told:
                continue
            told = self._notices.count
            if self._notices.name == "SIGUSR1":
                self._postpone()
            step.stop_in_order()
            if self._notices.name == "SIGTERM":
                self._on_term()
        return status

    def _postpone(self) -> None:
        """Wait where a short job's notice came at its very beginning."""
        try:
            delay_s = stop_delay_s(show_job(self._context.job_id, ANSWER_S), time.time())
        except ClusterError:
            return
        if delay_s > 0:
            tell(f"notice of the time limit comes early; the ranks are told in {format_duration(delay_s)}")
            self._notices.sleep(delay_s)


def read_outcome(
    run_dir: Path,
    history_length: int,
    status: int,
    failures: Sequence[RankFailure],
    max_steps: int,
    job_ids: Sequence[str],
    told_to_stop: bool,
) -> Ended:
    """Judge a start.

    Args:
        run_dir: the run's folder.
        history_length: events in its history when the start began.
        status: srun's exit status; negative where a signal ended srun.
        failures: of its ranks, the first cause first.
        max_steps: the recipe's; decides where a full disk has lost the END event.
        job_ids: ids under which this job, or what it succeeds, has held the run's lock.
        told_to_stop: the ranks were sent a signal to stop.
    """
    ends = [event for event in read_history(run_dir)[history_length:] if event["event"] == END]
    if ends and not ends[-1].get("failed", False):
        return _ended_in_order(ends[-1])
    if status == 0 and not failures:
        done = (newest_checkpoint(run_dir) or 0) >= max_steps
        return Ended(Outcome.COMPLETED if done else Outcome.STOPPED, "no end is on record", 0)
    first = failures[0] if failures else None
    exit_status = first.exit_status if first is not None and first.exit_status is not None else abs(status) or 1
    how = f"by signal {-status}" if status < 0 else f"with status {status}"
    why = first.describe() if first is not None else f"srun ended {how}"
    if told_to_stop and (status < 0 or (first is not None and first.signal in STOP_SIGNALS)):
        return Ended(Outcome.STOPPED, f"told to stop before it could ({why})", exit_status)
    if first is not None and first.error == "RunLockedError" and read_job_id(run_dir / LOCK_NAME) in job_ids:
        return Ended(Outcome.FAILED, f"an earlier start of this job still holds {run_dir}: {why}", exit_status)
    outcomes = {EXIT_USER_ERROR: Outcome.USER_ERROR, EXIT_TRAINING_ERROR: Outcome.TRAINING_ERROR}
    return Ended(outcomes.get(exit_status, Outcome.FAILED), why, exit_status)


def _ended_in_order(end: dict[str, Any]) -> Ended:
    reason = str(end.get("reason", ""))
    if end.get("completed"):
        return Ended(Outcome.COMPLETED, reason, 0)
    return Ended(Outcome.STOPPED_FOR_GOOD if "SIGINT" in reason else Outcome.STOPPED, reason, 0)


def prepare(context: JobContext, attempt_name: str, should_stop: Callable[[], bool]) -> Prepared:
    """Check and copy, as far as it is asked for.

    A setting that makes no sense is an end like any other: on record, and no successor comes to meet it again.
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
