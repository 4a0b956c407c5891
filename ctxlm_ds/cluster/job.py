"""The supervisor of a pretraining job: starts the ranks by srun, and sees to it that the run goes on.

`python -m ctxlm_ds.cluster.job -- RECIPE [options of ctxlm_ds.pretrain]` in a batch script (slurm/pretrain.sbatch).
In: the job's environment. Out: the job's exit status, the readable log on stdout, FAILURE, REQUEUE and GIVE_UP events.
Not here: the decision table (decide.py), a start of the ranks (ranks.py), carrying decisions out (ending.py).
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ctxlm_ds.cluster import attempts
from ctxlm_ds.cluster.attempts import START_FILE
from ctxlm_ds.cluster.commands import Job, broken_nodes, show_job
from ctxlm_ds.cluster.context import JobContext, read_context, show, tell
from ctxlm_ds.cluster.decide import Action, Outcome, Situation, decide
from ctxlm_ds.cluster.ending import Endings
from ctxlm_ds.cluster.notices import LEAST_TIME_S, Notices, still_ours, time_left_s
from ctxlm_ds.cluster.ranks import RankStart, RankStarter
from ctxlm_ds.cluster.run_files import newest_attempt, read_successor
from ctxlm_ds.cluster.settings import misspelt
from ctxlm_ds.cluster.successor import Successors
from ctxlm_ds.console import format_duration
from ctxlm_ds.errors import EXIT_UNEXPECTED, EXIT_USER_ERROR, ClusterError, ConfigError, CtxlmError
from ctxlm_ds.process.run_history import ATTEMPTS_DIR, END, read_history

DELAY_GROWTH = 4.0
MAX_DELAY_S = 600.0
OWNS = ("RUNNING", "PENDING", "CONFIGURING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD")
"""States of a job that has the run, or will go on with it. One that is completing gives it back in a moment."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; a user's mistake ends with one message and exit status 2."""
    notices = Notices().install()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return supervise(read_context(words[1:] if words[:1] == ["--"] else words), notices)
    except ClusterError as error:
        show(f"error: {error}")
        return EXIT_UNEXPECTED
    except (CtxlmError, OSError) as error:
        show(f"error: {error}")
        return EXIT_USER_ERROR


def supervise(context: JobContext, notices: Notices) -> int:
    """Start after start, until there is a reason to end; the job's exit status."""
    refuse_if_taken(context)
    for line in misspelt(context.environ):
        tell(line)
    successors = Successors(context)
    endings = Endings(context, successors)
    starter = RankStarter(context, notices, endings.on_term)
    for attempt in attempts.cut_short(context.run_dir, context.chain):
        why = attempts.note_cut_short(context.run_dir, attempt)
        tell(f"start {attempt.name} on {attempt.nodes} ended with its job: {why}")
    if context.settings.restart == "successor":
        tell(f"job {successors.submit()} waits to follow this one")
    while True:
        start = starter.start()
        action = decide(look(context, notices, start, starter.nodes))
        if action is not Action.RESTART:
            return endings.end(action, start, starter.exclude)
        endings.restart(start)
        pause(context, notices, start)


def look(context: JobContext, notices: Notices, start: RankStart, nodes: Sequence[str]) -> Situation:
    """Everything that the decision rests on; `nodes` are those that the ranks need."""
    job = show_job(context.job_id)
    run_dir, attempt = context.run_dir, start.attempt
    # This start is not on record yet.
    fruitless = len(attempts.fruitless_starts(run_dir, attempt)) + attempts.is_fruitless(run_dir, attempt)
    return Situation(
        outcome=start.ended.outcome,
        still_ours=job.restarts <= context.restarts and still_ours(job),
        time_is_up=bool(notices) or job.state != "RUNNING" or time_left_s(job, time.time()) < LEAST_TIME_S,
        broken_nodes=start.ended.outcome is Outcome.FAILED and bool(broken_nodes(nodes)),
        fruitless_starts=fruitless,
        max_restarts=context.settings.max_restarts,
        may_continue=context.settings.restart != "off",
    )


def pause(context: JobContext, notices: Notices, start: RankStart) -> None:
    """Wait a little before a restart in place, longer with each start that brings nothing, unless a signal comes."""
    fruitless = len(attempts.fruitless_starts(context.run_dir, start.attempt))
    delay_s = min(MAX_DELAY_S, context.settings.restart_delay_s * DELAY_GROWTH ** max(0, fruitless - 1))
    if delay_s and not notices:
        tell(f"starting again in {format_duration(delay_s)}")
        notices.sleep(delay_s)


def refuse_if_taken(context: JobContext, show: Callable[[str], Job] = show_job) -> None:
    """Make sure that a newly submitted job may have the run; one that was put back, or follows another, may.

    Raises:
        ConfigError: another job has it; the message names the job.
    """
    if context.restarts or context.chain != context.job_id or _is_complete(context.run_dir):
        return
    for job_id in _jobs_of(context.run_dir):
        with contextlib.suppress(ClusterError):  # Slurm has forgotten it
            state = show(job_id).state
            if job_id != context.job_id and state in OWNS:
                raise ConfigError(
                    f"{context.run_dir} is the run of job {job_id}, which is {state.lower()}. Wait until it ends, "
                    f"cancel it (scancel {job_id}), or choose another run_dir"
                )


def _is_complete(run_dir: Path) -> bool:
    """A job may go on with another run after it (a second phase)."""
    ends = [event for event in read_history(run_dir) if event["event"] == END]
    return bool(ends) and bool(ends[-1].get("completed"))


def _jobs_of(run_dir: Path) -> list[str]:
    """The job that started the run last, and the one that follows it."""
    found = [read_successor(run_dir)]
    attempt = newest_attempt(run_dir)
    if attempt is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found.append(str(json.loads((run_dir / ATTEMPTS_DIR / attempt / START_FILE).read_text())["job_id"]))
    return [job_id for job_id in found if job_id]



if __name__ == "__main__":
    sys.exit(main())
