"""Whether another job has the run already: one that runs, or waits in the queue to go on with it.

The run's lock keeps two jobs from writing at the same time; it says nothing of a job that is between two starts, and
a job that waits for the lock holds its nodes meanwhile.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from ctxlm_ds.cluster.attempts import START_FILE
from ctxlm_ds.cluster.commands import Job, show_job
from ctxlm_ds.cluster.context import JobContext
from ctxlm_ds.cluster.run_files import newest_attempt, read_successor
from ctxlm_ds.errors import ClusterError, ConfigError
from ctxlm_ds.process.run_history import ATTEMPTS_DIR, END, read_history

OWNS = ("RUNNING", "PENDING", "CONFIGURING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD")
"""States of a job that has the run, or will go on with it. One that is completing gives it back in a moment."""


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
