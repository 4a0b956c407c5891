"""Slurm's commands: run, read, and explained where they fail.

Out: Job (what Slurm says of a job), the states of nodes, requeue, submit, cancel. Not here: when to do which (job.py).
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctxlm_ds.errors import ClusterError

TIMEOUT_S = 120.0
PATIENCE_S = 600.0
RETRY_DELAY_S = 5.0
DISABLED = "disabled"
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=")
# Their values may look like fields: a command's arguments, for one.
_WHOLE_LINES = ("Command", "WorkDir", "Comment", "StdErr", "StdIn", "StdOut", "AdminComment", "SystemComment")
# Of sinfo's states, those of a node that runs nothing. The flag * means that it does not answer.
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
    def restarts(self) -> int:
        """How often Slurm has put the job back into the queue."""
        return int(self.fields.get("Restarts", "0"))

    @property
    def may_requeue(self) -> bool:
        """Whether Slurm would put it back into the queue."""
        return self.fields.get("Requeue", "1") == "1"

    def given(self, name: str) -> str:
        """A field, empty where Slurm says that there is none."""
        value = self.fields.get(name, "")
        return "" if value in ("(null)", "N/A", "None", "UNLIMITED") else value


def call(words: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """Run a command of Slurm; its output.

    Raises:
        ClusterError: it is missing, fails, or does not answer.
    """
    try:
        done = subprocess.run(
            list(words), capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False,
            env=None if environ is None else dict(environ),
        )  # fmt: skip
    except FileNotFoundError:
        raise ClusterError(f"{words[0]}: not found; Slurm's commands must be in PATH on the compute nodes") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{' '.join(words)}: no answer within {TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise ClusterError(f"{' '.join(words)}: status {done.returncode}: {said}")
    return done.stdout


def insist(words: Sequence[str], patience_s: float = PATIENCE_S) -> str:
    """call(), again and again where Slurm's controller is away for a while.

    Raises:
        ClusterError: Slurm refuses, or is away for longer than `patience_s`.
    """
    end_s = time.monotonic() + patience_s
    while True:
        try:
            return call(words)
        except ClusterError as error:
            if not _is_passing(str(error)) or time.monotonic() > end_s:
                raise
        time.sleep(RETRY_DELAY_S)


def _is_passing(message: str) -> bool:
    text = message.lower()
    return any(sign in text for sign in ("unable to contact", "timed out", "no answer", "connect", "temporarily"))


def show_job(job_id: str, patience_s: float = PATIENCE_S) -> Job:
    """What Slurm knows of a job.

    Raises:
        ClusterError: it knows none of that id (any more), or does not answer.
    """
    return Job(job_id, parse_fields(insist(["scontrol", "show", "job", job_id], patience_s)))


def parse_fields(text: str) -> dict[str, str]:
    """Lines of `A=1 B=x y C=` -> the values by name; a value may hold spaces, the first field of a name counts."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        found = list(_FIELD.finditer(line))
        if found and found[0][1] in _WHOLE_LINES:
            found = found[:1]
        ends = [following.start() for following in found[1:]] + [len(line)]
        for match, end in zip(found, ends):  # noqa: B905 (outside of containers Python 3.9 runs this)
            fields.setdefault(match[1], line[match.end() : end].strip())
    return fields


def broken_nodes(nodes: Sequence[str]) -> list[str]:
    """Those that are down or do not answer, each with its state."""
    lines = insist(["sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format", "%N %t"]).splitlines()
    states = dict(line.split() for line in lines if len(line.split()) == 2)
    return [f"{node} ({state})" for node, state in sorted(states.items()) if not _works(state)]


def _works(state: str) -> bool:
    return "*" not in state and not state.startswith(_BROKEN)


def requeue(job_id: str) -> None:
    """Put a running job back into the queue; Slurm then ends its processes.

    Raises:
        ClusterError: refused; `disabled` stands in the message where this job or cluster allows no requeue.
    """
    insist(["scontrol", "requeue", job_id])


def cancel(job_id: str) -> None:
    """Cancel a job; one that is gone is no error."""
    try:
        insist(["scancel", job_id])
    except ClusterError as error:
        if "invalid job id" not in str(error).lower():
            raise


def cancel_steps(job_id: str) -> None:
    """End the steps of a job that live on although their srun is gone; the batch script goes on."""
    shown = insist(["squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i"])
    steps = [step for step in shown.split() if step.rpartition(".")[2].isdigit()]
    for step in steps:
        cancel(step)


def node_address(node: str) -> str:
    """Slurm's address of a node, a name or a number."""
    return parse_fields(insist(["scontrol", "show", "node", node])).get("NodeAddr", "") or node
