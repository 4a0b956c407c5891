"""What a person sees of a pipeline: a table of its steps, with frames on a terminal, plain columns elsewhere.

In: a plan, verdicts, jobs. Out: lines or a rich table. Not here: any judgement.
"""

from __future__ import annotations

import glob
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from ctxlm_ds.cluster.pipeline_jobs import ActiveJob, Submitted
from ctxlm_ds.cluster.pipeline_steps import Plan
from ctxlm_ds.cluster.pipeline_submit import Submission, task_ranges
from ctxlm_ds.cluster.pipeline_verdict import State, Verdict

HEADER = ("step", "state", "job", "")
COMPLETED = "COMPLETED"
"""What Slurm says of a job that ended well."""


def state_word(verdict: Verdict, ended: str = "") -> str:
    """`running`, `queued`, `waiting`, `failed`, ... of a step; `ended` is how Slurm says that its last job ended."""
    if verdict.state is State.ACTIVE or (verdict.jobs and verdict.state is State.TO_DO):
        return _active_word(verdict.jobs)
    if verdict.state is State.TO_DO and verdict.replaces:
        return "waiting"
    if verdict.state is State.TO_DO and verdict.failed:
        return "failed"
    if verdict.state is State.TO_DO and ended not in ("", COMPLETED):
        return ended.lower()
    return verdict.state.value


def _active_word(jobs: Sequence[ActiveJob]) -> str:
    if any(not job.waits for job in jobs):
        return "running"
    return "waiting" if all(job.reason == "Dependency" for job in jobs) else "queued"


def status_rows(
    plan: Plan, verdicts: Mapping[str, Verdict], submitted: Mapping[str, Submitted], ended: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """Step, state, job, remark; `ended` says how the last job of a step ended that is neither done nor active."""
    rows: list[tuple[str, ...]] = []
    for step in plan.steps:
        verdict, last = verdicts[step.name], submitted.get(step.name)
        word = state_word(verdict, ended.get(step.name, ""))
        ids = list(dict.fromkeys(job.job_id for job in verdict.jobs)) or ([last.job_id] if last else [])
        log = _log_to_read(verdict, last, ended.get(step.name, ""))
        remark = "; ".join(part for part in (verdict.note, log and f"log: {log}") if part)
        if len(step.tasks) > 1 and verdict.jobs:
            running = sum(not job.waits for job in verdict.jobs)
            counts = f"{running} running, {len(verdict.jobs) - running} queued"
            remark = f"{counts}; {remark}" if verdict.tasks else counts
        rows.append((step.name, word, " ".join(ids), remark))
    return rows


def _log_to_read(verdict: Verdict, last: Submitted | None, ended: str) -> str:
    """What the last job of a step said before it ended; empty where it is at work, or has done what it was told."""
    if verdict.state is not State.TO_DO or verdict.jobs or last is None:
        return ""
    if not verdict.failed and (ended == COMPLETED or (verdict.was_done and not ended)):
        return ""
    log = last.log_file() if verdict.was_done else verdict.log or last.log_file()
    return log if glob.glob(log) else ""


def submitted_rows(
    plan: Plan, verdicts: Mapping[str, Verdict], submissions: Mapping[str, Submission]
) -> list[tuple[str, ...]]:
    """The same after a submission: which jobs are new, and what they wait for."""
    rows: list[tuple[str, ...]] = []
    for step in plan.steps:
        verdict, new = verdicts[step.name], submissions.get(step.name)
        if new is None:
            ids = list(dict.fromkeys(job.job_id for job in verdict.jobs))
            rows.append((step.name, state_word(verdict), " ".join(ids), verdict.note))
            continue
        parts = [f"array {task_ranges(new.tasks)}"] if len(step.tasks) > 1 else []
        parts += [f"after {', '.join(new.waits_for)}"] if new.waits_for else []
        rows.append((step.name, "submitted", new.job_id, "; ".join(parts)))
    return rows


def print_table(rows: Sequence[tuple[str, ...]], title: str, out: TextIO | None = None) -> None:
    """A rich table on a terminal that has the library, else columns."""
    out = out or sys.stdout
    if out.isatty() and _print_rich(rows, title):
        return
    table = [HEADER, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADER))]
    out.write(f"{title}\n")
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        out.write("  ".join(cells).rstrip() + "\n")


_COLOURS = {
    "done": "green", "running": "cyan", "submitted": "cyan", "failed": "red", "changed": "red", "timeout": "red",
    "cancelled": "red",
}  # fmt: skip


def _print_rich(rows: Sequence[tuple[str, ...]], title: str) -> bool:
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        return False
    table = Table(*HEADER, title=escape(title), title_justify="left")
    for step, word, job, remark in rows:
        colour = _COLOURS.get(word, "default")
        table.add_row(step, f"[{colour}]{word}[/]", job, escape(remark))
    Console().print(table)
    return True
