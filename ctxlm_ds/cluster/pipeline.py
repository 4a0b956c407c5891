"""From raw text to an exported model as jobs of a cluster: submits what is to do, leaves alone what is done.

    slurm/pipeline.sh RECIPE [--set a.b=c ...]             submit; again: whatever is left
    slurm/pipeline.sh RECIPE --dry-run                     show every command, submit nothing
    slurm/pipeline.sh RECIPE --status                      where each step is
    slurm/pipeline.sh RECIPE --redo                        make again what was made with other settings

The recipe's `pipeline` section says it all (docs/pipeline.md). Runs on a login node, without torch.
"""

from __future__ import annotations

import argparse
import glob
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from ctxlm_ds.cluster.pipeline_jobs import (
    JOBS_NAME,
    ActiveJob,
    Submitted,
    active_jobs,
    has_slurm,
    how_it_ended,
    read_submitted,
)
from ctxlm_ds.cluster.pipeline_plan import make_plan
from ctxlm_ds.cluster.pipeline_records import STEPS_DIR, all_records
from ctxlm_ds.cluster.pipeline_steps import Plan
from ctxlm_ds.cluster.pipeline_submit import Submission, Submitter, refuse_unreadable
from ctxlm_ds.cluster.pipeline_verdict import State, Verdict, judge
from ctxlm_ds.console import aligned, logger, run_command, setup_logging
from ctxlm_ds.errors import ClusterError
from ctxlm_ds.process.ranges import join_numbers
from ctxlm_ds.process.run_lock import RunLock

LOCK_WAIT_S = 30.0
HEADER = ("step", "state", "job", "")
COMPLETED = "COMPLETED"
"""What Slurm says of a job that ended well."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="slurm/pipeline.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a path, or the name of a shipped recipe")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="change settings")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="show every command and submit nothing")
    mode.add_argument("--status", action="store_true", help="where each step is, and the log of one that failed")
    parser.add_argument("--redo", action="store_true", help="make again what was made with other settings")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point.

    Raises:
        CtxlmError: what a user can mend.
    """
    arguments = parse_arguments(argv)
    setup_logging()
    plan = make_plan(arguments.recipe, arguments.set)
    if arguments.status:
        show_status(plan)
    elif arguments.dry_run:
        show_commands(plan, arguments.redo)
    else:
        if not has_slurm():
            raise ClusterError("sbatch and squeue are not in PATH; run this on a login node, or look with --dry-run")
        with RunLock(plan.folder / STEPS_DIR, remedy="choose another pipeline.output_dir").acquire(LOCK_WAIT_S):
            submitted = submit(plan, arguments.redo)
        if submitted:
            changes = ["--set", *arguments.set] if arguments.set else []
            _say(f"where it is: {shlex.join(['slurm/pipeline.sh', arguments.recipe, *changes, '--status'])}")


def submit(plan: Plan, redo: bool) -> bool:
    """Submit what is to do and print the jobs; whether there was anything.

    Raises:
        ClusterError: something was made with other settings (without `redo`), or Slurm refuses a job.
        DataError: texts that must be read are not there.
    """
    jobs = active_jobs(plan)
    verdicts = judge(plan, jobs)
    if redo:
        for place, aside in make_room(plan, verdicts):
            _say(f"kept as {aside}: {place}")
        verdicts = judge(plan, jobs)
    refuse_changed(plan, verdicts)
    submitter = Submitter(plan, verdicts, jobs)
    refuse_unreadable(plan, submitter.to_do())
    if not submitter.to_do():
        _finish_without(plan, verdicts)
        return False
    submissions = submitter.submit_all()
    print_table(submitted_rows(plan, verdicts, submissions), str(plan.folder))
    return True


def _finish_without(plan: Plan, verdicts: dict[str, Verdict]) -> None:
    show_table(plan, verdicts)
    left = [name for name, verdict in verdicts.items() if not verdict.is_finished]
    _say(f"nothing to submit: {', '.join(left)} in the queue" if left else "nothing to submit: everything is done")


def show_status(plan: Plan) -> None:
    """The table; without Slurm what the files say. One line where there is nothing to tell of."""
    verdicts = judge(plan, jobs_if_known(plan))
    if is_untouched(plan, verdicts):
        hint = "a relative pipeline.output_dir starts from the working directory"
        _say(f"nothing has been submitted or made in {plan.folder} yet ({hint})")
    else:
        show_table(plan, verdicts)


def is_untouched(plan: Plan, verdicts: dict[str, Verdict]) -> bool:
    """Whether no step was ever submitted or made."""
    if (plan.folder / JOBS_NAME).exists() or any((plan.folder / STEPS_DIR).glob("*.json")):
        return False
    return all(verdict.state is State.TO_DO and not (verdict.jobs or verdict.replaces) for verdict in verdicts.values())


def jobs_if_known(plan: Plan) -> dict[str, list[ActiveJob]]:
    """What is in the queue; nothing, and a warning, where Slurm cannot be asked."""
    try:
        return active_jobs(plan) if has_slurm() else {}
    except ClusterError as error:
        logger.warning("the queue is not known: %s", error)
        return {}


def show_table(plan: Plan, verdicts: dict[str, Verdict]) -> None:
    """Each step's state, with the log of one that failed."""
    submitted = read_submitted(plan.folder)
    left = [name for name, verdict in verdicts.items() if verdict.state is State.TO_DO and not verdict.jobs]
    ended = {
        name: how_it_ended(last_job(verdicts[name], submitted[name].job_id))
        for name in left
        if name in submitted and has_slurm()
    }
    print_table(status_rows(plan, verdicts, submitted, ended), str(plan.folder))


def last_job(verdict: Verdict, submitted: str) -> str:
    """The job that was last at a step: the one that was submitted, or a later one of its line of successors."""
    return max((submitted, verdict.run_job or "0"), key=int)


def show_commands(plan: Plan, redo: bool) -> None:
    """What a start would submit and run.

    Raises:
        ClusterError: something was made with other settings (without `redo`).
    """
    jobs = jobs_if_known(plan)
    verdicts = judge(plan, jobs)
    if redo:
        for name, places in places_to_clear(plan, verdicts).items():
            _say(f"{name} is made again; kept under another name: {', '.join(map(str, places)) or 'nothing'}")
        verdicts = as_if_cleared(plan, verdicts)
    refuse_changed(plan, verdicts)
    submitter = Submitter(plan, verdicts, jobs)
    refuse_unreadable(plan, submitter.to_do())
    previews = {submission.step.name: submission for submission in submitter.preview()}
    for step in plan.steps:
        verdict = verdicts[step.name]
        if step.name not in previews:
            _say(f"# {step.name}: {state_word(verdict)}{f' ({verdict.note})' if verdict.note else ''}")
            continue
        _say(f"# {step.name}: {verdict.note}")
        _say(previews[step.name].line)
        for command in step.commands:
            _say(f"    {command}")
    _say(f"nothing was submitted; {len(previews)} of {len(plan.steps)} steps would be")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def refuse_changed(plan: Plan, verdicts: Mapping[str, Verdict]) -> None:
    """Nothing that is there is made again without being asked for.

    Raises:
        ClusterError: lists every step that would be made again, and why.
    """
    changed = [verdict for verdict in verdicts.values() if verdict.state is State.CHANGED]
    if not changed:
        return
    lines = [f"  {verdict.step}: {text}" for verdict in changed for text in verdict.differences]
    busy = sorted({job.job_id for verdict in changed for job in verdict.jobs})
    if busy:
        remedy = f"Wait for the jobs, or cancel them (scancel {' '.join(busy)}), then run this again."
    else:
        remedy = (
            "Put the recipe back, choose another pipeline.output_dir, or run this again with --redo: these steps and "
            "what is made of them are made again, and what is there is kept under another name."
        )
    raise ClusterError(f"{plan.folder} was made otherwise, in {len(changed)} step{'s' if len(changed) > 1 else ''}:\n"
                       + "\n".join(lines) + f"\n{remedy}")  # fmt: skip


def places_to_clear(plan: Plan, verdicts: Mapping[str, Verdict]) -> dict[str, list[Path]]:
    """By step: files and folders that are in the way of making it again, those of its old records too."""
    found: dict[str, list[Path]] = {}
    for verdict in verdicts.values():
        if verdict.state is not State.CHANGED:
            continue
        outputs = [*plan.outputs(verdict.step)]
        for record in all_records(plan.folder, verdict.step).values():
            outputs += [output for output in record.outputs if output not in outputs]
        places = dict.fromkeys(Path(place) for output in outputs for place in output.places())
        found[verdict.step] = [place for place in places if os.path.lexists(place)]
    return found


def make_room(plan: Plan, verdicts: Mapping[str, Verdict]) -> list[tuple[Path, Path]]:
    """Rename what is in the way (beside itself, so that nothing is lost or copied) and forget how it was made.

    Returns:
        Old and new places.

    Raises:
        ClusterError: a job is at one of the steps.
    """
    if any(verdict.jobs for verdict in verdicts.values() if verdict.state is State.CHANGED):
        refuse_changed(plan, verdicts)
    mark = time.strftime("replaced-%Y%m%d-%H%M%S")
    moved = []
    for name, places in places_to_clear(plan, verdicts).items():
        for place in places:
            aside = _aside(place, mark)
            os.rename(place, aside)
            moved.append((place, aside))
        for path in all_records(plan.folder, name):
            path.unlink()
    return moved


def as_if_cleared(plan: Plan, verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """The verdicts after make_room(), for a preview.

    Raises:
        ClusterError: a job is at one of the steps.
    """
    changed = {verdict.step: verdict for verdict in verdicts.values() if verdict.state is State.CHANGED}
    if any(verdict.jobs for verdict in changed.values()):
        refuse_changed(plan, verdicts)
    found = dict(verdicts)
    for name in changed:
        tasks = tuple(range(len(plan.by_name[name].tasks)))
        found[name] = replace(verdicts[name], state=State.TO_DO, tasks=tasks, differences=())
    return found


def _aside(place: Path, mark: str) -> Path:
    """`train_text_sentence.bin` -> `train_text_sentence.MARK.bin`, so that a dataset still opens."""
    stem, dot, ending = place.name.partition(".")
    aside = place.with_name(f"{stem}.{mark}{dot}{ending}")
    number = 1
    while os.path.lexists(aside):
        number += 1
        aside = place.with_name(f"{stem}.{mark}-{number}{dot}{ending}")
    return aside


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
        parts = [f"array {join_numbers(new.tasks)}"] if len(step.tasks) > 1 else []
        parts += [f"after {', '.join(new.waits_for)}"] if new.waits_for else []
        rows.append((step.name, "submitted", new.job_id, "; ".join(parts)))
    return rows


def print_table(rows: Sequence[tuple[str, ...]], title: str, out: TextIO | None = None) -> None:
    """A rich table on a terminal that has the library, else columns."""
    out = out or sys.stdout
    if out.isatty() and _print_rich(rows, title):
        return
    out.write("\n".join([title, *aligned([HEADER, *rows], left=range(len(HEADER)), indent="")]) + "\n")


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


if __name__ == "__main__":
    run_command(main)
