"""The supervisor of a pretraining job: starts the ranks by srun, and sees to it that the run goes on.

`python -m ctxlm_ds.cluster.job -- RECIPE [options of ctxlm_ds.pretrain]` in a batch script (slurm/pretrain.sbatch).
In: the job's environment. Out: the job's exit status, the readable log on stdout, FAILURE, REQUEUE and GIVE_UP events.
Not here: the decision table (decide.py), a start of the ranks (ranks.py), carrying decisions out (ending.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from ctxlm_ds.cluster import attempts
from ctxlm_ds.cluster.commands import broken_nodes, show_job
from ctxlm_ds.cluster.context import JobContext, read_context, show, tell
from ctxlm_ds.cluster.decide import Action, Outcome, Situation, decide
from ctxlm_ds.cluster.ending import Endings
from ctxlm_ds.cluster.notices import Notices
from ctxlm_ds.cluster.other_jobs import refuse_if_taken
from ctxlm_ds.cluster.ranks import RankStart, RankStarter
from ctxlm_ds.cluster.settings import misspelt
from ctxlm_ds.cluster.successor import Successors
from ctxlm_ds.cluster.timing import LEAST_TIME_S, still_ours, time_left_s
from ctxlm_ds.console import format_duration
from ctxlm_ds.errors import EXIT_UNEXPECTED, EXIT_USER_ERROR, ClusterError, CtxlmError

DELAY_GROWTH = 4.0
MAX_DELAY_S = 600.0


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


if __name__ == "__main__":
    sys.exit(main())
