"""From raw text to an exported model as jobs of a cluster: submits what is to do, leaves alone what is done.

    slurm/pipeline.sh RECIPE [--set a.b=c ...]             submit; again: whatever is left
    slurm/pipeline.sh RECIPE --dry-run                     show every command, submit nothing
    slurm/pipeline.sh RECIPE --status                      where each step is
    slurm/pipeline.sh RECIPE --redo                        make again what was made with other settings

The recipe's `pipeline` section says it all (docs/pipeline.md). Runs on a login node, without torch.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from ctxlm_ds.cluster.pipeline_jobs import JOBS_NAME, ActiveJob, active_jobs, has_slurm, how_it_ended, read_submitted
from ctxlm_ds.cluster.pipeline_plan import make_plan
from ctxlm_ds.cluster.pipeline_records import STEPS_DIR
from ctxlm_ds.cluster.pipeline_redo import as_if_cleared, make_room, places_to_clear, refuse_changed
from ctxlm_ds.cluster.pipeline_steps import Plan
from ctxlm_ds.cluster.pipeline_submit import Submitter, refuse_unreadable
from ctxlm_ds.cluster.pipeline_table import print_table, state_word, status_rows, submitted_rows
from ctxlm_ds.cluster.pipeline_verdict import State, Verdict, judge
from ctxlm_ds.console import logger, run_command, setup_logging
from ctxlm_ds.errors import ClusterError
from ctxlm_ds.process.run_lock import RunLock

LOCK_WAIT_S = 30.0


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


if __name__ == "__main__":
    run_command(main)
