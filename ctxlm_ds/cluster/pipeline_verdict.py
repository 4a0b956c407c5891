"""What is done, what is to do, and what would have to be made again: each step judged by its outputs and its record.

In: a plan, the files in its folder, the jobs in the queue. Out: a verdict a step. Nothing is changed.
Not here: what is done about it (pipeline_submit.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

from ctxlm_ds.cluster.pipeline_jobs import ActiveJob
from ctxlm_ds.cluster.pipeline_outputs import Output, join_fingerprints, need_fingerprint
from ctxlm_ds.cluster.pipeline_records import DONE, FAILED, Record, all_records, read_order, read_record, record_path
from ctxlm_ds.cluster.pipeline_steps import Plan, Step, flatten
from ctxlm_ds.errors import ClusterError
from ctxlm_ds.recipe.choices import CHOICES, DATA
from ctxlm_ds.recipe.problems import show_value
from ctxlm_ds.recipe.schema import FIXED_WHATEVER_THE_ROWS, RunConfig
from ctxlm_ds.recipe.section import Section

CONTENTS = {"input": "the texts", "tokenizer": "the tokenizer", "data.train": "the datasets"}
"""Settings that are fingerprints, in words."""


class State(Enum):
    """Of a step."""

    DONE = "done"
    NOT_NEEDED = "not needed"
    ACTIVE = "active"
    TO_DO = "to do"
    CHANGED = "changed"
    """What is there was made of something else."""


@dataclass(frozen=True)
class Verdict:
    """Of one step."""

    step: str
    state: State
    tasks: tuple[int, ...] = ()
    """Jobs of its array that are to be submitted."""
    note: str = ""
    differences: tuple[str, ...] = ()
    """Why it would have to be made again."""
    content_differs: bool = False
    """Whether what is made of it would have to be made again as well."""
    jobs: tuple[ActiveJob, ...] = ()
    replaces: tuple[str, ...] = ()
    """Waiting jobs that can no longer do what they wait for."""
    failed: bool = False
    was_done: bool = False
    """Whether what is to do was done once: its output is gone, or other settings ask for more."""
    log: str | None = None
    run_job: str = ""
    """Of a run: the job that began it last, which may be a successor that nobody else has submitted."""

    @property
    def is_finished(self) -> bool:
        """Nothing is to be done or waited for."""
        return self.state in (State.DONE, State.NOT_NEEDED)


def judge(plan: Plan, jobs: Mapping[str, list[ActiveJob]]) -> dict[str, Verdict]:
    """All steps, in the plan's order."""
    verdicts: dict[str, Verdict] = {}
    for step in plan.steps:
        own = _judge_step(plan, step, verdicts)
        verdicts[step.name] = _with_jobs(plan, step, own, jobs.get(step.name, []), verdicts)
    for step in reversed(plan.steps):
        own, readers = verdicts[step.name], plan.readers(step.name)
        unread = bool(readers) and all(verdicts[reader.name].is_finished for reader in readers)
        if step.temporary and unread and own.state in (State.TO_DO, State.CHANGED) and not own.content_differs:
            note = "what is made of it is done"
            verdicts[step.name] = Verdict(step.name, State.NOT_NEEDED, note=note)
    return verdicts


# One step by its files


@dataclass(frozen=True)
class _Finding:
    """Of one job of a step's array."""

    state: State
    note: str = ""
    content_differs: bool = False
    record: Record | None = None
    was_complete: bool = False
    """Of a run: by the limits of then."""

    @property
    def failed(self) -> bool:
        return self.record is not None and self.record.state == FAILED

    @property
    def was_done(self) -> bool:
        return self.was_complete or (self.record is not None and self.record.state == DONE)


def _judge_step(plan: Plan, step: Step, verdicts: Mapping[str, Verdict]) -> Verdict:
    count = len(step.tasks)
    findings = []
    for task, outputs in enumerate(step.tasks):
        record = read_record(record_path(plan.folder, step.name, task, count))
        findings.append(_judge_task(plan, step, outputs, record, verdicts))
    changed = [finding for finding in findings if finding.state is State.CHANGED]
    differences = list(dict.fromkeys(finding.note for finding in changed))
    differences += [text for text in _other_layouts(plan, step) if text not in differences]
    to_do = tuple(task for task, finding in enumerate(findings) if finding.state is State.TO_DO)
    if differences:
        content = any(finding.content_differs for finding in changed)
        every = tuple(range(count))
        return Verdict(step.name, State.CHANGED, every, "; ".join(differences), tuple(differences), content)
    if not to_do:
        return Verdict(step.name, State.DONE)
    left = [findings[task] for task in to_do]
    first = min(left, key=lambda finding: (not finding.failed, finding.was_done))
    share = f"{len(to_do)} of {count}: " if len(to_do) < count else ""
    record = first.record
    return Verdict(
        step.name, State.TO_DO, to_do, share + first.note, content_differs=first.content_differs,
        failed=first.failed, was_done=first.was_done, log=record.log if record else None,
        run_job=record.job_id if record and step.is_pretraining else "",
    )  # fmt: skip


def _judge_task(
    plan: Plan, step: Step, outputs: tuple[Output, ...], record: Record | None, verdicts: Mapping[str, Verdict]
) -> _Finding:
    whole = join_fingerprints(outputs)
    if record is None:
        strange = [output.path for output in outputs if output.is_exclusive and output.exists()]
        if strange:
            return _Finding(State.CHANGED, f"{', '.join(strange)} is there, and this pipeline has not made it", True)
        return _Finding(State.TO_DO, "not made yet")
    settings, layout = _differences(record.settings, step.settings), _differences(record.layout, step.layout)
    stale = _stale(plan, record, step, verdicts)
    why = "; ".join([*settings.values(), *layout.values(), *stale])
    if step.is_pretraining:
        return _judge_run(record, whole, settings, stale)
    if record.state != DONE:
        return _Finding(State.TO_DO, record.unfinished, record=record)
    if outputs and whole is None:
        missing = "; ".join(output.missing() for output in outputs if output.fingerprint() is None)
        return _Finding(State.TO_DO, missing, record=record)
    if why:
        content = bool(settings or stale)
        return _Finding(State.TO_DO if step.rebuilds else State.CHANGED, why, content, record)
    if record.content != whole and not step.rebuilds:
        paths = ", ".join(output.path for output in outputs)
        return _Finding(State.CHANGED, f"{paths} is no longer what this step has made", True, record)
    return _Finding(State.DONE, record=record)


def _judge_run(record: Record, whole: str | None, settings: Mapping[str, str], stale: list[str]) -> _Finding:
    """A run is judged by its own evidence; one that has not come to its end goes on where its settings allow."""
    why = "; ".join([*settings.values(), *stale])
    if whole is not None:
        return _Finding(State.CHANGED, why, True, record) if why else _Finding(State.DONE, record=record)
    another = stale or [key for key in settings if key.startswith(_not_continued())]
    if another:
        return _Finding(State.CHANGED, why, True, record)
    # Complete by the limits of then: what was made of it will be made of another state.
    was_complete = join_fingerprints(record.outputs) is not None
    missing = "; ".join(output.missing() for output in record.outputs)
    note = f"goes on with {why}" if why else record.why or missing
    return _Finding(State.TO_DO, note, was_complete, record, was_complete)


def _stale(plan: Plan, record: Record, step: Step, verdicts: Mapping[str, Verdict]) -> list[str]:
    """What it is made of, where that is or will be something else."""
    texts = []
    for need in step.needs:
        if verdicts[need].content_differs:
            texts.append(f"it is made of {need}, which changes")
        elif need not in record.needs:
            texts.append(f"it was made without {need}")
        elif verdicts[need].state is State.DONE and record.needs[need] != need_fingerprint(plan.outputs(need)):
            texts.append(f"it was made of another {need} than the one that is there")
    gone = [name for name in record.needs if name not in step.needs]
    return texts + [f"it was made of {name}, which is no longer a step" for name in gone]


def _other_layouts(plan: Plan, step: Step) -> list[str]:
    """What stands there of an array of another size."""
    count = len(step.tasks)
    own = {record_path(plan.folder, step.name, task, count) for task in range(count)}
    others = [record for path, record in all_records(plan.folder, step.name).items() if path not in own]
    left = [record for record in others if any(output.exists() for output in record.outputs)]
    return list(dict.fromkeys(text for record in left for text in _differences(record.layout, step.layout).values()))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return a text for each setting that is not what it was. One that is younger than the record had its default.

    One that only other families, objectives or formats have counts for nothing: earlier versions recorded all of them.
    """
    texts = {}
    for key in dict.fromkeys((*before, *now)):
        old = before[key] if key in before else _default(key, now)
        new = now.get(key)
        if old == new or (key not in now and _is_of_others(key, now)):
            continue
        texts[key] = f"{CONTENTS[key]} changed" if key in CONTENTS else f"{key} {show_value(old)} -> {show_value(new)}"
    return texts


def _default(key: str, now: Mapping[str, Any]) -> Any:
    section = _section(key, now)
    field = None if section is None else section.model_fields.get(key.split(".")[1])
    return _defaults().get(key) if field is None else field.default


def _is_of_others(key: str, now: Mapping[str, Any]) -> bool:
    section = _section(key, now)
    return section is not None and key.split(".")[1] not in section.model_fields


def _section(key: str, now: Mapping[str, Any]) -> type[Section] | None:
    """Return the class of a setting's section, if it depends on a name."""
    choice = CHOICES.get(key.split(".")[0]) if "." in key else None
    return None if choice is None else choice.find({choice.key: now.get(choice.path, choice.default)})


@cache
def _not_continued() -> tuple[str, ...]:
    """Return the settings that make another run, also before its end."""
    rows = {f"data.{name}" for entry in DATA.entries().values() for name in entry.section.fixed}
    return (*FIXED_WHATEVER_THE_ROWS, *rows, "initialize_from", "data.train", "tokenizer")


@cache
def _defaults() -> dict[str, Any]:
    return flatten(RunConfig().model_dump(mode="json"))


# With the jobs in the queue


def _with_jobs(
    plan: Plan, step: Step, own: Verdict, jobs: list[ActiveJob], verdicts: Mapping[str, Verdict]
) -> Verdict:
    doomed = tuple(dict.fromkeys(job.job_id for job in jobs if job.is_doomed))
    jobs = [job for job in jobs if not job.is_doomed]
    if doomed:
        own = replace(own, replaces=doomed, note="its job waits for one that has failed")
    if not jobs or own.state is State.DONE:
        return own
    again = [name for name in step.comes_after if verdicts[name].state is State.TO_DO]
    if again and all(job.waits for job in jobs):
        waiting = tuple(dict.fromkeys(job.job_id for job in jobs))
        return replace(own, replaces=(*doomed, *waiting), note=f"its job waits for {again[0]}, to be submitted again")
    other = _other_orders(plan, step)
    if other:
        note = f"job {jobs[0].job_id} is at it with other settings: {'; '.join(other)}"
        return replace(own, state=State.CHANGED, tasks=(), note=note, differences=(note,), jobs=tuple(jobs))
    busy = {job.task for job in jobs}
    left = () if None in busy else tuple(task for task in own.tasks if task not in busy)
    if own.state is State.TO_DO and left:
        return replace(own, tasks=left, jobs=tuple(jobs))
    return replace(own, state=State.ACTIVE, tasks=(), note="", differences=(), content_differs=False, jobs=tuple(jobs))


def _other_orders(plan: Plan, step: Step) -> list[str]:
    """What the jobs in the queue were told otherwise."""
    try:
        order = read_order(plan.order(step).path)
    except ClusterError:
        return []
    texts = _differences(order.settings, step.settings) | _differences(order.layout, step.layout)
    return list(texts.values())
