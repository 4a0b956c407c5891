"""The jobs of a pipeline: which were submitted (OUTPUT/pipeline.json), which Slurm still has, how the others ended.

Jobs are known by their names, which hold a mark of the output folder: NAME-STEP-MARK. So a lost pipeline.json, a
successor that a job has submitted for itself, and a job submitted in the moment of a crash are all found in the queue.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import write_text
from ctxlm_ds.cluster.commands import call, insist
from ctxlm_ds.cluster.pipeline_steps import Plan, Step
from ctxlm_ds.errors import ClusterError

JOBS_NAME = "pipeline.json"
NEVER_SATISFIED = "DependencyNeverSatisfied"
WAITING_STATES = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED")
SEPARATOR = "\x1f"


@dataclass(frozen=True)
class ActiveJob:
    """A job, or one of an array, that Slurm has yet to finish."""

    job_id: str
    """Of the array, where it is one of an array."""
    task: int | None
    state: str
    reason: str

    @property
    def waits(self) -> bool:
        """Whether it has not begun."""
        return self.state in WAITING_STATES

    @property
    def is_doomed(self) -> bool:
        """Whether it waits for a job that has failed."""
        return self.waits and self.reason.startswith(NEVER_SATISFIED)


@dataclass(frozen=True)
class Submitted:
    """One submission of a step."""

    job_id: str
    tasks: tuple[int, ...]
    log: str
    """sbatch's pattern."""
    time_unix_s: float

    def log_file(self) -> str:
        """The file, with * for the number of a job of an array."""
        return re.sub(r"%[jA]", self.job_id, self.log).replace("%a", "*")


def job_name(plan: Plan, step: str) -> str:
    """Alike for every submission of a step, different for every folder."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', plan.name)}-{step}-{zlib.crc32(str(plan.folder).encode()):08x}"


def active_jobs(plan: Plan) -> dict[str, list[ActiveJob]]:
    """What Slurm has of each step, oldest first.

    Raises:
        ClusterError: Slurm does not answer.
    """
    form = SEPARATOR.join(("%i", "%T", "%r", "%j"))
    lines = insist(["squeue", "--noheader", "--array", f"--user={os.getuid()}", f"--format={form}"]).splitlines()
    return parse_queue(plan, lines)


def parse_queue(plan: Plan, lines: Iterable[str]) -> dict[str, list[ActiveJob]]:
    """squeue's lines by step."""
    # A job that may have a successor gets a second mark.
    steps = {step.name: re.compile(re.escape(job_name(plan, step.name)) + r"(-[0-9a-f]{8})?") for step in plan.steps}
    found: dict[str, list[ActiveJob]] = {}
    for line in lines:
        parts = line.strip().split(SEPARATOR)
        if len(parts) != 4:
            continue
        number, state, reason, name = parts
        job_id, _, task = number.partition("_")
        for step, pattern in steps.items():
            if pattern.fullmatch(name):
                job = ActiveJob(job_id, int(task) if task.isdigit() else None, state, reason)
                found.setdefault(step, []).append(job)
    return {step: sorted(jobs, key=lambda job: (int(job.job_id), job.task or 0)) for step, jobs in found.items()}


def has_slurm() -> bool:
    """Whether this machine can submit jobs."""
    return shutil.which("sbatch") is not None and shutil.which("squeue") is not None


def read_submitted(folder: Path) -> dict[str, Submitted]:
    """The last submission of each step; empty where nothing was submitted."""
    try:
        steps = json.loads((folder / JOBS_NAME).read_text(encoding="utf-8"))["steps"]
        return {name: Submitted(**{**job, "tasks": tuple(job["tasks"])}) for name, job in steps.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def note_submitted(plan: Plan, step: Step, job_id: str, tasks: Sequence[int], log: str) -> None:
    """Remember a submission."""
    jobs: dict[str, Any] = {name: asdict(job) for name, job in read_submitted(plan.folder).items()}
    jobs[step.name] = asdict(Submitted(job_id, tuple(tasks), log, round(time.time(), 3)))
    content = {"version": 1, "recipe": plan.recipe, "steps": jobs}
    write_text(plan.folder / JOBS_NAME, json.dumps(content, indent=1) + "\n")


def how_it_ended(job_id: str) -> str:
    """`FAILED`, `TIMEOUT`, `CANCELLED` ... of a job that is no longer in the queue; empty where Slurm has forgotten."""
    try:
        shown = call(["scontrol", "show", "job", "-o", job_id])
        states = set(re.findall(r"JobState=([A-Z_]+)", shown))
    except ClusterError:
        try:
            shown = call(["sacct", "--noheader", "--allocations", f"--jobs={job_id}", "--format=State"])
            states = {line.split()[0].rstrip("+") for line in shown.splitlines() if line.strip()}
        except ClusterError:
            return ""
    bad = sorted(states - {"COMPLETED"})
    return ", ".join(bad or sorted(states))


def newest_ids(step: Step, jobs: Mapping[str, list[ActiveJob]]) -> list[str]:
    """The jobs of a step that another must wait for: every submission of an array, the last of a line of successors."""
    ids = list(dict.fromkeys(job.job_id for job in jobs.get(step.name, [])))
    return ids[-1:] if step.is_pretraining else ids
