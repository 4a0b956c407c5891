"""Jobs that wait for a job, made to wait for another one instead: for a run that goes on in a successor.

A job submitted with --dependency=afterok:JOB starts, or is cancelled, by how JOB itself ends. Where JOB's run goes on
in another job, what waits must wait for that one. In: two ids. Out: changed dependencies. Needs no further package.
"""

from __future__ import annotations

import os
import re

from ctxlm_ds.cluster.commands import insist
from ctxlm_ds.errors import ClusterError

SEPARATOR = "\x1f"
_STATE = re.compile(r"\((?:unfulfilled|failed|fulfilled)\)")
_IDS = re.compile(r"(?<=:)(\d+)(?![\d_])")


def move_dependants(old_id: str, new_id: str) -> list[str]:
    """Let every pending job of this user that waits for one job wait for another.

    Returns:
        Ids of the jobs that were changed. One that ends or starts meanwhile is passed over.

    Raises:
        ClusterError: Slurm does not answer.
    """
    form = SEPARATOR.join(("%A", "%E"))
    words = ["squeue", "--noheader", "--states=PENDING", f"--user={os.getuid()}", f"--format={form}"]
    moved = []
    for line in dict.fromkeys(insist(words).splitlines()):
        job_id, _, dependency = line.strip().partition(SEPARATOR)
        changed = moved_dependency(dependency, old_id, new_id)
        if changed is None or job_id == new_id:
            continue
        try:
            insist(["scontrol", "update", f"jobid={job_id}", f"dependency={changed}"])
        except ClusterError:
            continue
        moved.append(job_id)
    return moved


def moved_dependency(dependency: str, old_id: str, new_id: str) -> str | None:
    """squeue's `afterok:12(unfulfilled),afterok:3_*(unfulfilled)` as scontrol takes it, with another id; None where it
    does not hold the old one."""
    plain = _STATE.sub("", dependency).replace("_*", "")
    ids = _IDS.findall(plain)
    if old_id not in ids:
        return None
    return _IDS.sub(lambda match: new_id if match[1] == old_id else match[1], plain)
