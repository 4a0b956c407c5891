"""The supervisor of a pretraining job: starts the ranks by srun, and restarts or requeues them.

`python -m ctxlm_ds.apps.cluster.job -- RECIPE [options of ctxlm_ds.pretrain]` in a batch script
(slurm/pretrain.sbatch).
"""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from pathlib import Path

from ctxlm_ds.apps.cluster import rank_start
from ctxlm_ds.apps.cluster import slurm_commands as slurm
from ctxlm_ds.apps.cluster.job_context import JobContext, JobSignals, log, read_context, show
from ctxlm_ds.apps.cluster.rank_start import OUTPUT_NAME, LogFilter, Outcome, RankStart, gather_failures, report
from ctxlm_ds.console import format_duration
from ctxlm_ds.errors import EXIT_UNEXPECTED, EXIT_USER_ERROR, ClusterError, ConfigError, CtxlmError
from ctxlm_ds.process import run_history as history
from ctxlm_ds.process.run_files import read_status

DELAY_GROWTH, MAX_DELAY_S = 4.0, 600.0
WAIT_FOR_LOCK_S = 180
POLL_S, ANSWER_S, LAST_OUTPUT_S = 0.5, 20.0, 30.0
OWNS = ("RUNNING", "PENDING", "CONFIGURING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD")
"""States of a job that has the run or will resume it. A completing job gives it back soon."""
FINE = (Outcome.COMPLETED, Outcome.STOPPED_FOR_GOOD)


class Action(Enum):
    """What to do when the ranks have ended."""

    DONE = "done"
    STOP = "stop, with the ranks' status"
    LEAVE = "leave it to Slurm, which has ended or requeued the job"
    GIVE_UP = "give up"
    RESTART = "start again in this allocation"
    CONTINUE_LATER = "put the job back into the queue"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; a user's mistake ends with one message and exit status 2."""
    signals = JobSignals().install()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return Supervisor(read_context(words[1:] if words[:1] == ["--"] else words), signals).run()
    except (CtxlmError, OSError) as error:
        show(f"error: {error}")
        return EXIT_UNEXPECTED if isinstance(error, ClusterError) else EXIT_USER_ERROR


def decide(
    outcome: Outcome, *, still_ours: bool, time_is_up: bool, broken_nodes: bool, may_continue: bool, gives_up: bool
) -> Action:
    """Return the action of the first row that fits.

    `still_ours`: the job has been neither cancelled nor requeued; `time_is_up`: it was asked to stop, or too little
    time is left; `gives_up`: as many starts in a row as allowed made no progress, this one included.
    """
    if outcome in FINE:
        return Action.DONE
    if not still_ours:
        return Action.LEAVE
    if outcome in (Outcome.USER_ERROR, Outcome.TRAINING_ERROR) or not may_continue:
        return Action.STOP
    if gives_up:
        return Action.GIVE_UP
    if outcome is Outcome.STOPPED or time_is_up or broken_nodes:
        return Action.CONTINUE_LATER
    return Action.RESTART


def refuse_run_of_another(run_dir: Path, own_id: str | None, show: Callable[[str], slurm.Job] = slurm.show_job) -> None:
    """Raise ConfigError if a job other than `own_id` has a run; a complete one may be extended.

    Without `own_id`, before a job is queued, a job that was queued and is still waiting has it too.
    """
    newest = next(reversed(rank_start.list_starts(run_dir)), None)
    job_ids = [] if own_id is not None else [read_status(run_dir).get("submitted")]
    job_ids += [newest.job_id] if newest is not None and not history.is_completed(run_dir) else []
    for job_id in map(str, filter(None, job_ids)):
        with contextlib.suppress(ClusterError):  # Slurm has forgotten it
            job = show(job_id)
            # Slurm counts the restart of a job before its processes have ended.
            ends = newest is not None and newest.name.startswith(f"job-{job_id}-{job.restarts - 1}-")
            requeued = job.state == "COMPLETING" and ends
            if job_id != own_id and (job.state in OWNS or requeued):
                state = "requeued" if requeued else job.state.lower()
                raise ConfigError(
                    f"{run_dir} is the run of job {job.name}, which is {state}. Wait until it ends, "
                    f"cancel it (scancel {job.name}), or choose another run_dir"
                )


class Supervisor:
    """Starts the ranks of one job until there is a reason to end, and carries that end out."""

    def __init__(self, context: JobContext, signals: JobSignals) -> None:
        self._context, self._signals, self._run_dir = context, signals, context.run_dir
        self._tries = 0

    def run(self) -> int:
        """Return the job's exit status."""
        context, run_dir = self._context, self._run_dir
        if context.in_series and history.is_completed(run_dir):
            if (rank_start.newest_checkpoint(run_dir) or 0) >= context.max_steps:
                log(f"{run_dir} is complete; nothing is left for this task of the array")
                return 0
        elif not context.restarts and not context.in_series:
            refuse_run_of_another(run_dir, context.job_id)
        for line in rank_start.note_cut_short(run_dir, context.job_id):
            log(line)
        while True:
            start = self._start()
            action = self._next_action(start)
            if action is not Action.RESTART:
                return self.end(action, start)
            self._note_failure(start)
            self._report(start)
            # Longer with each start without progress.
            fruitless = len(rank_start.fruitless_starts(run_dir, start.record))
            delay_s = min(MAX_DELAY_S, context.settings.restart_delay_s * DELAY_GROWTH ** max(0, fruitless - 1))
            if delay_s and not self._signals:
                log(f"starting again in {format_duration(delay_s)}")
                self._signals.sleep(delay_s)

    def _start(self) -> RankStart:
        """Run the ranks to their end and judge it. Raises OSError if the run directory cannot be written."""
        context, signals = self._context, self._signals
        name = f"{history.JOB_ATTEMPT}{context.job_id}-{context.restarts}-{self._tries}"
        record = rank_start.begin(context.run_dir, name, context.job_id, context.node_list)
        self._tries += 1
        again = f", restart {context.restarts}" if context.restarts else ""
        log(f"start {name} on {context.node_list}{again}; {record.describe()}")
        if signals and not (signals.name == "SIGUSR1" and self._delay_s() > 0.0):
            return RankStart(record, Outcome.STOPPED, f"{signals.name} came before the start", 0)
        folder, before = context.run_dir / history.ATTEMPTS_DIR / name, len(history.read_history(context.run_dir))
        # Before the user's own option, which wins.
        wait = ["--wait-for-lock", str(WAIT_FOR_LOCK_S)]
        words = [context.settings.python, "-m", "ctxlm_ds.pretrain", *wait, *context.words]
        command = rank_start.srun_command(words, context.settings, *context.task_words)
        lines = LogFilter(show)
        step = rank_start.start_srun(command, rank_start.step_environment(context.environ, name, context.nodes[0]))
        status = self.watch(step, partial(lines.read, folder / OUTPUT_NAME))
        if status < 0:
            slurm.cancel_steps(context.job_id)
        failures = gather_failures(folder, lines.slurm_lines, lines.held)
        return RankStart(record, *rank_start.read_outcome(context, before, status, failures, bool(signals)), failures)

    def watch(self, step: subprocess.Popen[str], read: Callable[[Iterable[str]], object]) -> int:
        """Return srun's exit status when `read`, in a thread, has taken its output; negative if a signal ended it."""
        reader = threading.Thread(target=read, args=(step.stdout,), name="srun-output", daemon=True)
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
                self._notice(step)
            step.send_signal(signal.SIGUSR1)  # every rank saves and stops; srun itself ends at TERM
            if self._signals.name == "SIGTERM":
                self._on_term()

    def _delay_s(self) -> float:
        """Return how long a notice must wait that came at a short job's very beginning; 0 if Slurm does not answer."""
        with contextlib.suppress(ClusterError):
            return slurm.stop_delay_s(slurm.show_job(self._context.job_id, ANSWER_S), time.time())
        return 0.0

    def _notice(self, step: subprocess.Popen[str]) -> None:
        """Say how near the time limit is; wait if the notice of it came early, but not longer than the ranks run."""
        left, count = "", self._signals.count
        if (delay_s := self._delay_s()) > 0.0:
            log(f"notice of the time limit comes early; the ranks get it in {format_duration(delay_s)}")
            end_s = time.monotonic() + delay_s
            while time.monotonic() < end_s and self._signals.count == count and step.poll() is None:
                time.sleep(min(POLL_S, delay_s))
        with contextlib.suppress(ClusterError):
            left_s = slurm.time_left_s(slurm.show_job(self._context.job_id, ANSWER_S), time.time())
            left = f", {format_duration(left_s)} before the time limit" if math.isfinite(left_s) else ""
        log(f"SIGUSR1{left}: the ranks save and stop")

    def _next_action(self, start: RankStart) -> Action:
        context, record = self._context, start.record
        job = slurm.show_job(context.job_id)
        # This start is not on record yet.
        this_one = record.checkpoint_step == rank_start.newest_checkpoint(self._run_dir)
        fruitless = rank_start.fruitless_starts(self._run_dir, record)
        return decide(
            start.outcome,
            still_ours=job.restarts <= context.restarts and slurm.still_ours(job),
            time_is_up=bool(self._signals)
            or job.state != "RUNNING"
            or slurm.time_left_s(job, time.time()) < slurm.LEAST_TIME_S,
            broken_nodes=start.outcome is Outcome.FAILED and slurm.has_broken(context.nodes),
            may_continue=context.settings.restarts,
            gives_up=len(fruitless) + this_one >= context.settings.max_restarts,
        )

    def end(self, action: Action, start: RankStart) -> int:
        """Carry out every action but a restart; return the exit status."""
        if action is Action.DONE:
            log(start.describe())
            return 0
        if action is Action.CONTINUE_LATER:
            self._continue_later(start)
            return 0
        if action is Action.LEAVE:
            if slurm.show_job(self._context.job_id).restarts > self._context.restarts:
                how = "Slurm has requeued the job"
                rank_start.finish(self._run_dir, start.record, history.REQUEUE, start.why, how)
                log(f"{start.describe()}; {how}")
            else:
                self._note_failure(start, rank_start.CANCELLED)
                log(f"{start.describe()}; {rank_start.CANCELLED}; to resume: submit the same command again")
            return start.exit_status
        self._note_failure(start)
        if action is Action.GIVE_UP:
            fruitless = rank_start.fruitless_starts(self._run_dir, start.record)
            self._report(start)
            why = f"gave up: {len(fruitless)} starts in a row made no progress; {start.record.describe()}"
            history.append_event(self._run_dir, history.GIVE_UP, why=why, job_id=self._context.job_id)
            log(why)
            for event in fruitless:
                show(f"  {event.get('attempt')}: {event.get('why')}")
            show(f"evidence of each is in {self._run_dir / history.ATTEMPTS_DIR}; fix the cause and submit again")
        else:
            log(f"{start.outcome.value}; not started again")
            self._report(start)
        return start.exit_status or EXIT_UNEXPECTED

    def _continue_later(self, start: RankStart) -> None:
        if start.outcome is Outcome.FAILED:
            self._note_failure(start)
            self._report(start)
        log(f"{start.describe()}; putting the job back into the queue")
        try:
            how = self._put_back()
        except ClusterError as error:
            self._note_failure(start, str(error))
            raise
        rank_start.finish(self._run_dir, start.record, history.REQUEUE, start.why, how)
        log(how)

    def _put_back(self) -> str:
        job_id = self._context.job_id
        try:
            slurm.requeue(job_id)
            return f"job {slurm.named(job_id)} is requeued"
        except ClusterError as error:
            if slurm.DISABLED not in str(error):
                raise
            if self._context.is_followed:
                return slurm.NEXT_TASK
            raise ClusterError(
                f"{error}. To continue, submit again; as an array of tasks that follow each other: --array=1-10%1"
            ) from error

    def _on_term(self) -> None:
        """Put the job back when Slurm ends it at its time limit: SIGKILL may come before the ranks have saved."""
        try:
            job = slurm.show_job(self._context.job_id, patience_s=0.0)
            may_continue = self._context.settings.restarts and job.restarts <= self._context.restarts
            if job.state != "RUNNING" and slurm.still_ours(job) and may_continue:
                why = f"Slurm ends the job ({job.given('Reason') or 'preempted'})"
                attempt = rank_start.list_starts(self._run_dir)[-1].name
                history.append_event(self._run_dir, rank_start.CUT_SHORT, why=why, attempt=attempt)
                log(f"{why}: {self._put_back()}")
        except ClusterError as error:
            log(str(error))

    def _report(self, start: RankStart) -> None:
        for line in report(start.failures, self._run_dir / history.ATTEMPTS_DIR / start.record.name):
            show(line)
        if not start.failures:
            show(f"error: {start.why}")

    def _note_failure(self, start: RankStart, how: str | None = None) -> None:
        first = start.failures[0].rank if start.failures else None
        details = {"exit_status": start.exit_status, "first_rank": first}
        rank_start.finish(self._run_dir, start.record, history.FAILURE, start.why, how, **details)


if __name__ == "__main__":
    sys.exit(main())
