"""How long a job has, whose it is, and when a notice of its end is passed on to the ranks. Pure."""

from __future__ import annotations

import math
import time

from ctxlm_ds.cluster.commands import Job

# With less than this left another start in place is not worth while.
LEAST_TIME_S = 90.0
# Slurm sends the notice of a limit shorter than --signal's time at the job's very beginning.
SHORT_LIMIT_S = 600.0
ENDED_BY_SLURM = ("TimeLimit", "NodeDown")
TOO_EARLY = 0.75
LATE_ENOUGH = 0.25


def still_ours(job: Job) -> bool:
    """Whether nobody has cancelled the job: it runs, or its time, a node or a preemption has ended it.

    Of a job that has been requeued since, this says nothing.
    """
    return job.state == "RUNNING" or job.given("Reason") in ENDED_BY_SLURM or bool(job.given("PreemptTime"))


def time_left_s(job: Job, now_s: float) -> float:
    """Seconds until Slurm ends the job; infinite where it has no limit."""
    return _unix_s(job.given("EndTime"), math.inf) - now_s


def stop_delay_s(job: Job, now_s: float) -> float:
    """How long to wait before the ranks are told of a notice: 0 but for one that a short job got at its beginning."""
    end_s = _unix_s(job.given("EndTime"), math.inf)
    limit_s = end_s - _unix_s(job.given("StartTime"), now_s)
    left_s = end_s - now_s
    if limit_s > SHORT_LIMIT_S or left_s <= TOO_EARLY * limit_s:
        return 0.0
    return left_s - LATE_ENOUGH * limit_s


def _unix_s(text: str, default: float) -> float:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return default
