"""Slurm's commands: run, parsed, and explained if they fail."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctxlm_ds.errors import ClusterError
from ctxlm_ds.process.run_history import own_job_id

TIMEOUT_S = 120.0
PATIENCE_S = 600.0
RETRY_DELAY_S = 5.0
DISABLED = "disabled"
NEXT_TASK = "the next task of the array continues the run"
# With less time left another start in this allocation is not worthwhile.
LEAST_TIME_S = 90.0
# If the limit is shorter than --signal's time, Slurm sends the notice at the job's very beginning.
SHORT_LIMIT_S = 600.0
TOO_EARLY = 0.75
LATE_ENOUGH = 0.25
ENDED_BY_SLURM = ("TimeLimit", "NodeDown")
_PASSING = ("unable to contact", "timed out", "no answer", "connect", "temporarily")  # errors of a busy controller
# sinfo's states of a node that runs nothing. The flag * means that it does not answer.
_BROKEN = ("down", "unk", "inval", "err", "boot", "pow")


@dataclass(frozen=True)
class Job:
    """One job as `scontrol show job` describes it."""

    job_id: str
    fields: Mapping[str, str]

    @property
    def state(self) -> str:
        """RUNNING, COMPLETING, PENDING, CANCELLED, ..."""
        return self.fields.get("JobState", "")

    @property
    def name(self) -> str:
        """The job as squeue shows it: a task of an array as ARRAY_TASK."""
        array, task = self.given("ArrayJobId"), self.given("ArrayTaskId")
        return f"{array}_{task}" if array and task.isdigit() else self.job_id

    @property
    def restarts(self) -> int:
        """How often Slurm has put the job back into the queue."""
        return int(self.fields.get("Restarts", "0"))

    def given(self, name: str) -> str:
        """Return a field, empty if Slurm has no value for it."""
        value = self.fields.get(name, "")
        return "" if value in ("(null)", "N/A", "None", "UNLIMITED") else value


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
    left_s = time_left_s(job, now_s)
    limit_s = now_s + left_s - _unix_s(job.given("StartTime"), now_s)
    is_early = limit_s <= SHORT_LIMIT_S and left_s > TOO_EARLY * limit_s
    return left_s - LATE_ENOUGH * limit_s if is_early else 0.0


def _unix_s(text: str, default: float) -> float:
    with contextlib.suppress(ValueError):
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    return default


def call(words: Sequence[str], timeout_s: float = TIMEOUT_S) -> str:
    """Run a command of Slurm and return its output. Raises ClusterError if it is missing, fails or does not answer."""
    try:
        done = subprocess.run(
            list(words), capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False,
            env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
        )  # fmt: skip
    except FileNotFoundError:
        raise ClusterError(f"{words[0]}: not found; Slurm's commands must be in PATH on the compute nodes") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{' '.join(words)}: no answer within {timeout_s:.0f} s") from None
    if done.returncode != 0:
        message = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise ClusterError(f"{' '.join(words)}: status {done.returncode}: {message}")
    return done.stdout


def insist(words: Sequence[str], patience_s: float = PATIENCE_S) -> str:
    """Repeat call() while Slurm's controller does not answer, for `patience_s`. Raises ClusterError as call()."""
    end_s = time.monotonic() + patience_s
    while True:
        try:
            return call(words, min(TIMEOUT_S, max(RETRY_DELAY_S, patience_s)))
        except ClusterError as error:
            if time.monotonic() > end_s or not any(sign in str(error).lower() for sign in _PASSING):
                raise
        time.sleep(RETRY_DELAY_S)


def show_job(job_id: str, patience_s: float = PATIENCE_S) -> Job:
    """Return Slurm's record of a job. Raises ClusterError if it has none (any more), or does not answer."""
    records = insist(["scontrol", "show", "job", job_id], patience_s).split("\n\n")
    # A task of an array may have the array's id, which shows all tasks.
    own = (record for record in records if record.lstrip().startswith(f"JobId={job_id} "))
    return Job(job_id, parse_fields(next(own, records[0])))


def named(job_id: str) -> str:
    """Return a job as commands that change it must name it (own_job_id)."""
    return own_job_id() or job_id if job_id == os.environ.get("SLURM_JOB_ID") else job_id


def parse_fields(text: str) -> dict[str, str]:
    """Parse `A=1 B=x` from the second line on, because a job's name in the first line may look like a field.

    The first field of a name counts: the texts that a user writes (Command, Comment) come last.
    """
    return dict(reversed([word.partition("=")[::2] for word in text.partition("\n")[2].split()]))


def has_broken(nodes: Sequence[str]) -> bool:
    """Return whether one of the nodes is down or does not answer."""
    states = insist(["sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format=%t"]).split()
    return any("*" in state or state.startswith(_BROKEN) for state in states)


def cancel_steps(job_id: str) -> None:
    """End the steps of a job whose srun has ended; the batch script continues."""
    shown = insist(["squeue", "--noheader", "--steps", f"--jobs={named(job_id)}", "--format=%i"])
    steps = [step for step in shown.split() if step.rpartition(".")[2].isdigit()]
    for step in steps:
        with contextlib.suppress(ClusterError):  # it has just ended
            insist(["scancel", step])


def requeue(job_id: str) -> None:
    """Put a running job back into the queue; Slurm then ends its processes.

    Raises ClusterError if it is refused, with DISABLED in the message if this job or cluster allows no requeue.
    """
    insist(["scontrol", "requeue", named(job_id)])
