"""What a job does when a start of its ranks is over: notes it, reports it, and carries out what was decided.

In: a RankStart and an Action. Out: the job's exit status, events in RUN/history.jsonl, requeues and successors.
"""

from __future__ import annotations

from typing import Any

from ctxlm_ds.cluster import attempts
from ctxlm_ds.cluster.commands import DISABLED, call, requeue, show_job
from ctxlm_ds.cluster.context import JobContext, show, tell
from ctxlm_ds.cluster.decide import Action, Ended, Outcome
from ctxlm_ds.cluster.evidence import report
from ctxlm_ds.cluster.exclusions import requeue_command
from ctxlm_ds.cluster.notices import still_ours
from ctxlm_ds.cluster.ranks import RankStart
from ctxlm_ds.cluster.successor import Successors
from ctxlm_ds.errors import EXIT_UNEXPECTED, ClusterError
from ctxlm_ds.process.run_history import ATTEMPTS_DIR, FAILURE, GIVE_UP, REQUEUE, append_event

FINE = (Outcome.COMPLETED, Outcome.STOPPED_FOR_GOOD)


class Endings:
    """The ends of one job's starts, and its own."""

    def __init__(self, context: JobContext, successors: Successors) -> None:
        self._context = context
        self._successors = successors

    def restart(self, start: RankStart) -> None:
        """Note and report a start after which another follows in this allocation."""
        self._note(start, FAILURE)
        self._report(start)

    def end(self, action: Action, start: RankStart, exclude: tuple[str, ...] = ()) -> int:
        """Carry out every action but a restart; the job's exit status.

        Raises:
            ClusterError: Slurm neither requeues the job nor takes a successor.
        """
        if action is Action.CONTINUE_LATER:
            return self._continue_later(start, exclude)
        if action is Action.LEAVE:
            return self._leave(start)
        if action is Action.GIVE_UP:
            return self._give_up(start)
        return self._stop(start)

    def _stop(self, start: RankStart) -> int:
        """For good, well or badly."""
        ended = start.ended
        self._successors.cancel()
        if ended.outcome in FINE:
            self._note(start, "")
            tell(f"{ended.outcome.value}: {ended.why}")
            return 0
        self._note(start, FAILURE)
        tell(f"{ended.outcome.value}; not started again")
        self._report(start)
        return ended.exit_status or EXIT_UNEXPECTED

    def _continue_later(self, start: RankStart, exclude: tuple[str, ...]) -> int:
        if start.ended.outcome is Outcome.FAILED:
            self._note(start, FAILURE)
            self._report(start)
        tell(f"{_in_words(start.ended)}; putting the job back into the queue")
        how = self._put_back(exclude)
        self._note(start, REQUEUE, how=how)
        tell(how)
        return 0

    def _put_back(self, exclude: tuple[str, ...]) -> str:
        """Requeue or submit a successor, as the settings and the cluster allow; in words."""
        mode, job_id = self._context.settings.restart, self._context.job_id
        if mode != "successor":
            try:
                if exclude:
                    call(requeue_command(job_id, exclude))
                else:
                    requeue(job_id)
                return f"job {job_id} is requeued"
            except ClusterError as error:
                if mode == "requeue" or DISABLED not in str(error):
                    raise
        return f"job {self._successors.submit(exclude)} follows this one"

    def _leave(self, start: RankStart) -> int:
        """Slurm or a person has requeued or cancelled the job: it is theirs."""
        requeued = show_job(self._context.job_id).restarts > self._context.restarts
        how = "Slurm has requeued the job" if requeued else attempts.CANCELLED
        self._note(start, REQUEUE if requeued else FAILURE, how=how)
        if not requeued:
            self._successors.cancel(begun=True)
        tell(f"{_in_words(start.ended)}; {how}")
        return start.ended.exit_status

    def on_term(self) -> None:
        """Slurm ends the job: what cannot wait until the ranks have saved, because SIGKILL may come first.

        At the time limit the job is put back; of a job that a person cancels the successor goes first of all.
        """
        try:
            job = show_job(self._context.job_id, patience_s=0.0)
            if job.state == "RUNNING" or job.restarts > self._context.restarts:
                return
            if not still_ours(job):
                self._successors.cancel(begun=True)
            elif self._context.settings.restart != "off":
                tell(f"Slurm ends the job ({job.given('Reason') or 'preempted'}): {self._put_back(())}")
        except ClusterError as error:
            tell(str(error))

    def _give_up(self, start: RankStart) -> int:
        run_dir = self._context.run_dir
        self._note(start, FAILURE)
        fruitless = attempts.fruitless_starts(run_dir, start.attempt)
        self._report(start)
        why = f"gave up: {len(fruitless)} starts in a row made no progress; {start.attempt.in_words()}"
        append_event(run_dir, GIVE_UP, why=why, chain=self._context.chain, job_id=self._context.job_id)
        self._successors.cancel()
        tell(why)
        for event in fruitless:
            show(f"  {event.get('attempt')}: {event.get('why')}")
        show(f"evidence of each is in {run_dir / ATTEMPTS_DIR}; when the cause is mended, submit again")
        return start.ended.exit_status or EXIT_UNEXPECTED

    def _report(self, start: RankStart) -> None:
        for line in report(start.failures, self._context.run_dir / ATTEMPTS_DIR / start.attempt.name):
            show(line)
        if not start.failures:
            show(f"error: {start.ended.why}")

    def _note(self, start: RankStart, event: str, **details: Any) -> None:
        if event == FAILURE:
            first = start.failures[0].rank if start.failures else None
            details = {"exit_status": start.ended.exit_status, "first_rank": first, **details}
        attempts.finish(self._context.run_dir, start.attempt, event, start.ended.why, **details)


def _in_words(ended: Ended) -> str:
    return f"{ended.outcome.value}: {ended.why}"
