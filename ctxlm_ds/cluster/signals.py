"""Signals to the job itself (USR1 ahead of the time limit, TERM at its end) and the time that it has left.

The signals are noted here; job.py acts on them, rank_start.py passes them on.
"""

from __future__ import annotations

import math
import os
import signal
import time
from types import FrameType

from ctxlm_ds.cluster.slurm_commands import Job

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
EARLY_VARIABLE = "CTXLM_NOTICE"
# With less time left another start in this allocation is not worthwhile.
LEAST_TIME_S = 90.0
# If the limit is shorter than --signal's time, Slurm sends the notice at the job's very beginning.
SHORT_LIMIT_S = 600.0
ENDED_BY_SLURM = ("TimeLimit", "NodeDown")
TOO_EARLY = 0.75
LATE_ENOUGH = 0.25


class JobSignals:
    """The signals that the job has got. Install it before anything slow: until then they are lost."""

    def __init__(self) -> None:
        self.name = "a signal at the job's beginning" if os.environ.pop(EARLY_VARIABLE, "") else ""
        """The signal that came last; empty if none came."""
        self.count = 1 if self.name else 0

    def __bool__(self) -> bool:
        return bool(self.count)

    def install(self) -> JobSignals:
        """Handle the signals from now on (main thread only)."""
        for number in SIGNALS:
            signal.signal(number, self._handle)
        return self

    def sleep(self, seconds: float) -> None:
        """Wait, but no longer than until a signal comes."""
        end_s, count = time.monotonic() + seconds, self.count
        while time.monotonic() < end_s and self.count == count:
            time.sleep(min(0.1, seconds))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self.count += 1


def still_ours(job: Job) -> bool:
    """Return False if the job was cancelled: it does not run, and neither its time, a node nor a preemption ended it.

    This says nothing about a job that has been requeued since.
    """
    return job.state == "RUNNING" or job.given("Reason") in ENDED_BY_SLURM or bool(job.given("PreemptTime"))


def time_left_s(job: Job, now_s: float) -> float:
    """Return the seconds until Slurm ends the job; infinite without a limit."""
    return _unix_s(job.given("EndTime"), math.inf) - now_s


def stop_delay_s(job: Job, now_s: float) -> float:
    """Return how long to wait before a notice reaches the ranks; non-zero only if a short job got it at its start."""
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
