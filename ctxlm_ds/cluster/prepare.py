"""Before the ranks of a job start for the first time: a check of its nodes, a copy of its data on their own disks.

Both are off unless slurm/env.sh asks for them (CTXLM_PREFLIGHT, CTXLM_STAGE_DIR). Out: Prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ctxlm_ds.cluster.context import JobContext
from ctxlm_ds.cluster.decide import Ended, Outcome, Prepared
from ctxlm_ds.cluster.preflight import run_preflight
from ctxlm_ds.cluster.staging import run_staging
from ctxlm_ds.cluster.steps import step_environment
from ctxlm_ds.errors import EXIT_USER_ERROR, ConfigError


def prepare(context: JobContext, attempt_name: str, should_stop: Callable[[], bool]) -> Prepared:
    """Check and copy, as far as it is asked for.

    A setting that makes no sense is an end like any other: on record, and no successor comes to meet it again.
    """
    prepared = Prepared(srun_words=context.task_words)
    environ = step_environment(context.environ, attempt_name, None)
    if environ.get("CTXLM_PREFLIGHT", "0") not in ("", "0", "no", "false", "off"):
        try:
            prepared = run_preflight(context, attempt_name, environ, should_stop)
        except ConfigError as error:
            return Prepared(Ended(Outcome.USER_ERROR, str(error), EXIT_USER_ERROR))
    if prepared.ended is None and environ.get("CTXLM_STAGE_DIR"):
        nodes = [node for node in context.tasks if node not in prepared.left_out]
        return replace(prepared, settings=tuple(run_staging(context, nodes, environ, should_stop)))
    return prepared
