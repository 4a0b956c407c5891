"""Submitting what is to do, in order, each step behind those that it needs.

In: a plan and its verdicts. Out: jobs in the queue, orders and recipes in OUTPUT/steps, OUTPUT/pipeline.json.
Not here: what is to do (pipeline_verdict.py), what is made again (pipeline.py).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ctxlm_ds import atomic
from ctxlm_ds.cluster.commands import call, cancel
from ctxlm_ds.cluster.pipeline_commands import from_checkout
from ctxlm_ds.cluster.pipeline_jobs import ActiveJob, job_name, newest_ids, note_submitted
from ctxlm_ds.cluster.pipeline_records import LOGS_DIR, ORDER_VARIABLE, STEPS_DIR
from ctxlm_ds.cluster.pipeline_steps import Plan, Step
from ctxlm_ds.cluster.pipeline_verdict import State, Verdict
from ctxlm_ds.errors import ClusterError, DataError
from ctxlm_ds.process.ranges import join_numbers
from ctxlm_ds.recipe.pipeline_schema import StepResources

RESOURCE_OPTIONS = {
    "nodes": "--nodes", "ntasks_per_node": "--ntasks-per-node", "gpus_per_node": "--gpus-per-node",
    "cpus": "--cpus-per-task", "memory": "--mem", "time": "--time", "partition": "--partition", "account": "--account",
}  # fmt: skip


@dataclass(frozen=True)
class Submission:
    """One step's sbatch."""

    step: Step
    words: tuple[str, ...]
    environ: Mapping[str, str]
    log: str
    tasks: tuple[int, ...]
    replaces: tuple[str, ...]
    waits_for: tuple[str, ...]
    """Steps whose jobs must end well before it."""
    job_id: str = ""

    @property
    def line(self) -> str:
        """As a user would type it."""
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*assignments, shlex.join(self.words)])


def sbatch_options(resources: StepResources) -> list[str]:
    """What a step's job asks for."""
    given = {option: getattr(resources, name) for name, option in RESOURCE_OPTIONS.items()}
    return [f"{option}={value}" for option, value in given.items() if value is not None] + list(resources.extra)


@dataclass
class Submitter:
    """Gives each step that is to do its job.

    Args:
        plan: all steps.
        verdicts: of all steps.
        jobs: in the queue, by step.
    """

    plan: Plan
    verdicts: Mapping[str, Verdict]
    jobs: Mapping[str, list[ActiveJob]]
    _ids: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for step in self.plan.steps:
            replaced = self.verdicts[step.name].replaces
            self._ids[step.name] = [number for number in newest_ids(step, self.jobs) if number not in replaced]

    def to_do(self) -> list[Step]:
        """The steps to submit, in order."""
        return [step for step in self.plan.steps if self.verdicts[step.name].state is State.TO_DO]

    def submission(self, step: Step) -> Submission:
        """The sbatch of one step; its dependencies are those submitted so far (names where not submitted)."""
        tasks = self.verdicts[step.name].tasks
        is_array = len(step.tasks) > 1
        log = str(self.plan.folder / LOGS_DIR / (f"{step.name}-%A_%a.log" if is_array else f"{step.name}-%j.log"))
        words = ["sbatch", "--parsable", f"--job-name={job_name(self.plan, step.name)}", f"--output={log}"]
        waits_for = [name for name in step.comes_after if self._ids[name]]
        if waits_for:
            ids = ":".join(number for name in waits_for for number in self._ids[name])
            words += [f"--dependency=afterok:{ids}", "--kill-on-invalid-dep=yes"]
        if is_array:
            limit = f"%{self.plan.tasks_at_once}" if self.plan.tasks_at_once else ""
            words.append(f"--array={join_numbers(tasks)}{limit}")
        words += sbatch_options(step.resources)
        order = str(self.plan.order(step).path)
        environ = {}
        if step.is_pretraining:
            environ = {ORDER_VARIABLE: order}
            words += [from_checkout("slurm", "pretrain.sbatch"), str(self.plan.folder / STEPS_DIR / str(step.recipe))]
        else:
            words += [from_checkout("slurm", "step.sbatch"), order]
        replaces = self.verdicts[step.name].replaces
        return Submission(step, tuple(words), environ, log, tasks, replaces, tuple(waits_for))

    def preview(self) -> list[Submission]:
        """What would be submitted; `<step>` stands for ids that are not known yet."""
        found = []
        for step in self.to_do():
            found.append(self.submission(step))
            self._ids[step.name].append(f"<{step.name}>")
        return found

    def submit_all(self) -> dict[str, Submission]:
        """Submit; by step, with their ids.

        Raises:
            ClusterError: Slurm refuses one. What was submitted before it stays, and is found again.
        """
        return {step.name: self._submit(self.submission(step)) for step in self.to_do()}

    def _submit(self, submission: Submission) -> Submission:
        step = submission.step
        for job_id in submission.replaces:
            cancel(job_id)
        Path(submission.log).parent.mkdir(parents=True, exist_ok=True)
        if step.recipe is not None:
            atomic.write_text(self.plan.folder / STEPS_DIR / step.recipe, self.plan.recipes[step.recipe])
        self.plan.order(step).write()
        try:
            job_id = call(submission.words, {**os.environ, **submission.environ}).strip().split(";")[0]
        except ClusterError as error:
            raise ClusterError(
                f"{step.name}: {error}\nThe steps before it are submitted or done; mend pipeline.resources and run "
                "the same command again"
            ) from error
        if not job_id.isdigit():
            raise ClusterError(f"{step.name}: sbatch answered {job_id!r} instead of a job's id")
        note_submitted(self.plan, step, job_id, submission.tasks, submission.log)
        self._ids[step.name].append(job_id)
        return replace(submission, job_id=job_id)


def refuse_unreadable(plan: Plan, steps: Sequence[Step]) -> None:
    """The texts must be there for the steps that read them.

    Raises:
        DataError: lists what cannot be read.
    """
    problems = list(dict.fromkeys(step.unreadable for step in steps if step.unreadable))
    if problems:
        listed = "\n".join(f"  {text}" for text in problems)
        raise DataError(f"recipe {plan.recipe}: the texts cannot be read:\n{listed}")
