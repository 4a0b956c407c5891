"""Before the ranks of a job start for the first time: a check of its nodes, a copy of its data on their own disks.

Both are off unless slurm/env.sh asks for them (CTXLM_PREFLIGHT, CTXLM_STAGE_DIR). Out: Prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ctxlm_ds.cluster import preflight
from ctxlm_ds.cluster.context import JobContext, tell
from ctxlm_ds.cluster.decide import Ended, Outcome
from ctxlm_ds.cluster.staging import run_staging
from ctxlm_ds.cluster.steps import rank_python, step_environment, wrap_in_container
from ctxlm_ds.errors import EXIT_USER_ERROR, ConfigError


@dataclass(frozen=True)
class Prepared:
    """What the checks found, for all starts in this allocation."""

    ended: Ended | None = None
    """Why the ranks do not start at all."""
    exclude: tuple[str, ...] = ()
    """Nodes to keep away from when the job is put back."""
    left_out: tuple[str, ...] = ()
    """Nodes of this allocation that the ranks do without."""
    srun_words: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    """`a.b=c` for --set."""


def prepare(context: JobContext, attempt_name: str, should_stop: Callable[[], bool]) -> Prepared:
    """Check and copy, as far as it is asked for.

    A setting that makes no sense is an end like any other: on record, and no successor comes to meet it again.
    """
    try:
        return _check_and_copy(context, attempt_name, should_stop)
    except ConfigError as error:
        return Prepared(Ended(Outcome.USER_ERROR, str(error), EXIT_USER_ERROR))


def _check_and_copy(context: JobContext, attempt_name: str, should_stop: Callable[[], bool]) -> Prepared:
    environ = context.environ
    prepared = Prepared(srun_words=context.task_words)
    job = _preflight_job(context, attempt_name)
    step_environ = step_environment(environ, attempt_name, None)
    if preflight.is_wanted(environ):
        prepared = _judge(preflight.run_preflight(job, step_environ, tell, should_stop), prepared)
    if prepared.ended is None and environ.get("CTXLM_STAGE_DIR"):
        settings = run_staging(job, context.words, step_environ, tell, should_stop, prepared.left_out)
        prepared = Prepared(None, prepared.exclude, prepared.left_out, prepared.srun_words, tuple(settings))
    return prepared


def _preflight_job(context: JobContext, attempt_name: str) -> preflight.PreflightJob:
    options, python = wrap_in_container([rank_python(context.settings)], context.settings)
    return preflight.PreflightJob(
        run_dir=context.run_dir,
        attempt=attempt_name,
        tasks=context.tasks,
        job_id=context.job_id,
        partition=context.environ.get("SLURM_JOB_PARTITION"),
        srun=("srun", *options, *context.settings.srun_options),
        python=tuple(python),
    )


def _judge(found: preflight.Outcome, before: Prepared) -> Prepared:
    if found.action == preflight.GO:
        if found.why:
            tell(found.why)
        return Prepared(None, found.exclude, tuple(found.bad), found.srun_words or before.srun_words)
    ended = {
        preflight.REPLACE: Ended(Outcome.STOPPED, found.why, 0),
        preflight.INTERRUPTED: Ended(Outcome.STOPPED, found.why, 0),
    }.get(found.action, Ended(Outcome.USER_ERROR, found.why, EXIT_USER_ERROR))
    return Prepared(ended, found.exclude)
