"""The supervisor of a pretraining job: starts the ranks by srun, and restarts or requeues them.

`python -m ctxlm_ds.apps.cluster.job -- RECIPE [options of ctxlm_ds.pretrain]` in a batch script
(slurm/pretrain.sbatch).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.cluster import start_records
from ctxlm_ds.apps.cluster.job_context import JobContext, JobSignals, log, read_context, show
from ctxlm_ds.apps.cluster.rank_failures import report
from ctxlm_ds.apps.cluster.rank_start import RankStart, RankStarter
from ctxlm_ds.apps.cluster.restart_policy import Action, Outcome, decide
from ctxlm_ds.apps.cluster.run_files import SUBMITTED_NAME, newest_attempt, read_job_id
from ctxlm_ds.apps.cluster.settings import misspelt
from ctxlm_ds.apps.cluster.slurm_commands import (
    DISABLED,
    LEAST_TIME_S,
    Job,
    broken_nodes,
    requeue,
    show_job,
    still_ours,
    time_left_s,
)
from ctxlm_ds.apps.cluster.successor import RECORD_NAME, Successors
from ctxlm_ds.console import format_duration
from ctxlm_ds.errors import EXIT_UNEXPECTED, EXIT_USER_ERROR, ClusterError, ConfigError, CtxlmError
from ctxlm_ds.process.run_history import ATTEMPTS_DIR, FAILURE, GIVE_UP, REQUEUE, append_event, is_completed

DELAY_GROWTH = 4.0
MAX_DELAY_S = 600.0
OWNS = ("RUNNING", "PENDING", "CONFIGURING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD")
"""States of a job that has the run or will resume it. A completing job gives it back soon."""
FINE = (Outcome.COMPLETED, Outcome.STOPPED_FOR_GOOD)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; a user's mistake ends with one message and exit status 2."""
    signals = JobSignals().install()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return supervise(read_context(words[1:] if words[:1] == ["--"] else words), signals)
    except (CtxlmError, OSError) as error:
        show(f"error: {error}")
        return EXIT_UNEXPECTED if isinstance(error, ClusterError) else EXIT_USER_ERROR


def supervise(context: JobContext, signals: JobSignals) -> int:
    """Start the ranks until there is a reason to end; return the job's exit status."""
    refuse_if_taken(context)
    for line in misspelt(context.environ):
        log(line)
    successors = Successors(context)
    endings = Endings(context, successors)
    starter = RankStarter(context, signals, endings.on_term)
    for record in start_records.cut_short(context.run_dir, context.chain):
        why = start_records.note_cut_short(context.run_dir, record)
        log(f"start {record.name} on {record.nodes} ended with its job: {why}")
    if context.settings.restart == "successor":
        log(f"job {successors.submit()} waits to follow this one")
    while True:
        start = starter.start()
        action = next_action(context, signals, start, starter.nodes)
        if action is not Action.RESTART:
            return endings.end(action, start, starter.exclude)
        endings.restart(start)
        pause(context, signals, start)


def next_action(context: JobContext, signals: JobSignals, start: RankStart, nodes: Sequence[str]) -> Action:
    """Collect the facts and decide; `nodes` are those that the ranks need."""
    job = show_job(context.job_id)
    run_dir, record = context.run_dir, start.record
    # This start is not on record yet.
    this_one = record.checkpoint_step == start_records.newest_checkpoint(run_dir)
    fruitless = len(start_records.fruitless_starts(run_dir, record)) + this_one
    return decide(
        start.ended.outcome,
        still_ours=job.restarts <= context.restarts and still_ours(job),
        time_is_up=bool(signals) or job.state != "RUNNING" or time_left_s(job, time.time()) < LEAST_TIME_S,
        broken_nodes=start.ended.outcome is Outcome.FAILED and bool(broken_nodes(nodes)),
        may_continue=context.settings.restart != "off",
        fruitless_starts=fruitless,
        max_restarts=context.settings.max_restarts,
    )


def pause(context: JobContext, signals: JobSignals, start: RankStart) -> None:
    """Wait before a restart in this allocation, longer with each start without progress, unless a signal comes."""
    fruitless = len(start_records.fruitless_starts(context.run_dir, start.record))
    delay_s = min(MAX_DELAY_S, context.settings.restart_delay_s * DELAY_GROWTH ** max(0, fruitless - 1))
    if delay_s and not signals:
        log(f"starting again in {format_duration(delay_s)}")
        signals.sleep(delay_s)


def refuse_if_taken(context: JobContext, show: Callable[[str], Job] = show_job) -> None:
    """Refuse (ConfigError) a newly submitted job whose run another job has; one that was put back, or follows, may."""
    if not context.restarts and context.chain == context.job_id:
        refuse_run_of_another(context.run_dir, context.job_id, show)


def refuse_run_of_another(run_dir: Path, own_id: str | None, show: Callable[[str], Job] = show_job) -> None:
    """Raise ConfigError if a job other than `own_id` has a run; a complete one may be extended (a second phase).

    Without `own_id`, before a job is queued, a job that was queued and is still waiting has it too.
    """
    newest = newest_attempt(run_dir) or ""
    records = [run_dir / SUBMITTED_NAME] if own_id is None else []
    if not is_completed(run_dir):
        records += [run_dir / RECORD_NAME, run_dir / ATTEMPTS_DIR / newest / start_records.START_FILE]
    for job_id in filter(None, map(read_job_id, records)):
        with contextlib.suppress(ClusterError):  # Slurm has forgotten it
            job = show(job_id)
            # Slurm counts the restart of a job before its processes have ended.
            requeued = job.state == "COMPLETING" and newest.startswith(f"job-{job_id}-{job.restarts - 1}-")
            if job_id != own_id and (job.state in OWNS or requeued):
                raise ConfigError(
                    f"{run_dir} is the run of job {job_id}, which is {'requeued' if requeued else job.state.lower()}. "
                    f"Wait until it ends, cancel it (scancel {job_id}), or choose another run_dir"
                )


class Endings:
    """The ends of one job's starts, and of the job."""

    def __init__(self, context: JobContext, successors: Successors) -> None:
        self._context = context
        self._successors = successors

    def restart(self, start: RankStart) -> None:
        """Record and report a start after which another follows in this allocation."""
        self._note(start, FAILURE)
        self._report(start)

    def end(self, action: Action, start: RankStart, exclude: tuple[str, ...] = ()) -> int:
        """Carry out every action but a restart; return the exit status. Raises ClusterError if Slurm refuses it."""
        if action is Action.CONTINUE_LATER:
            return self._continue_later(start, exclude)
        if action is Action.LEAVE:
            return self._leave(start)
        if action is Action.GIVE_UP:
            return self._give_up(start)
        return self._stop(start)

    def _stop(self, start: RankStart) -> int:
        ended = start.ended
        self._successors.cancel()
        if ended.outcome in FINE:
            self._note(start, "")
            log(ended.describe())
            return 0
        self._note(start, FAILURE)
        log(f"{ended.outcome.value}; not started again")
        self._report(start)
        return ended.exit_status or EXIT_UNEXPECTED

    def _continue_later(self, start: RankStart, exclude: tuple[str, ...]) -> int:
        if start.ended.outcome is Outcome.FAILED:
            self.restart(start)
        log(f"{start.ended.describe()}; putting the job back into the queue")
        how = self._put_back(exclude)
        self._note(start, REQUEUE, how=how)
        log(how)
        return 0

    def _put_back(self, exclude: tuple[str, ...]) -> str:
        mode, job_id = self._context.settings.restart, self._context.job_id
        if mode != "successor":
            try:
                requeue(job_id, exclude)
                return f"job {job_id} is requeued"
            except ClusterError as error:
                if mode == "requeue" or DISABLED not in str(error):
                    raise
        return f"job {self._successors.submit(exclude)} follows this one"

    def _leave(self, start: RankStart) -> int:
        """Leave a job that Slurm or a person has requeued or cancelled."""
        requeued = show_job(self._context.job_id).restarts > self._context.restarts
        how = "Slurm has requeued the job" if requeued else start_records.CANCELLED
        self._note(start, REQUEUE if requeued else FAILURE, how=how)
        if not requeued:
            self._successors.cancel(begun=True)
        log(f"{start.ended.describe()}; {how}{'' if requeued else '; to resume: submit the same command again'}")
        return start.ended.exit_status

    def on_term(self) -> None:
        """Do what cannot wait until the ranks have saved when Slurm ends the job, because SIGKILL may come first.

        At the time limit the job is put back; if a person cancels it, its successor is cancelled.
        """
        try:
            job = show_job(self._context.job_id, patience_s=0.0)
            if job.state == "RUNNING" or job.restarts > self._context.restarts:
                return
            if not still_ours(job):
                self._successors.cancel(begun=True)
            elif self._context.settings.restart != "off":
                log(f"Slurm ends the job ({job.given('Reason') or 'preempted'}): {self._put_back(())}")
        except ClusterError as error:
            log(str(error))

    def _give_up(self, start: RankStart) -> int:
        run_dir = self._context.run_dir
        self._note(start, FAILURE)
        fruitless = start_records.fruitless_starts(run_dir, start.record)
        self._report(start)
        why = f"gave up: {len(fruitless)} starts in a row made no progress; {start.record.describe()}"
        append_event(run_dir, GIVE_UP, why=why, chain=self._context.chain, job_id=self._context.job_id)
        self._successors.cancel()
        log(why)
        for event in fruitless:
            show(f"  {event.get('attempt')}: {event.get('why')}")
        show(f"evidence of each is in {run_dir / ATTEMPTS_DIR}; fix the cause and submit again")
        return start.ended.exit_status or EXIT_UNEXPECTED

    def _report(self, start: RankStart) -> None:
        for line in report(start.failures, self._context.run_dir / ATTEMPTS_DIR / start.record.name):
            show(line)
        if not start.failures:
            show(f"error: {start.ended.why}")

    def _note(self, start: RankStart, event: str, **details: Any) -> None:
        if event == FAILURE:
            first = start.failures[0].rank if start.failures else None
            details = {"exit_status": start.ended.exit_status, "first_rank": first, **details}
        start_records.finish(self._context.run_dir, start.record, event, start.ended.why, **details)


if __name__ == "__main__":
    sys.exit(main())
