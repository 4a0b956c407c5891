"""Nodes that a run keeps away from: RUN/excluded_nodes.json, and the words that tell scontrol, sbatch and srun.

Slurm takes a new list of excluded nodes for pending jobs alone. A job that has just requeued itself counts as one, but
its processes are sent SIGTERM at once, so the command that does both ignores that signal (Slurm 22.05).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import write_text
from ctxlm_ds.cluster.commands import call, show_job
from ctxlm_ds.errors import ClusterError, ConfigError
from ctxlm_ds.process.slurm import expand_hostlist

EXCLUDED_NAME = "excluded_nodes.json"
_REQUEUE = """trap '' TERM USR1
scontrol requeue "$1" || exit
for _ in 1 2 3 4 5; do scontrol update JobId="$1" ExcNodeList="$2" && exit; sleep 0.5; done
exit 1"""


def excluded_nodes(run_dir: Path) -> dict[str, str]:
    """Excluded nodes and why; empty if none are, or the file cannot be read. Removing the file lets all in again."""
    try:
        entries = json.loads((run_dir / EXCLUDED_NAME).read_text(encoding="utf-8"))
        return {str(node): str(entry["why"]) for node, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def remember_excluded(run_dir: Path, bad: Mapping[str, str], attempt: str) -> None:
    """Add nodes to RUN/excluded_nodes.json; one that is in it keeps its first reason. Raises OSError."""
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads((run_dir / EXCLUDED_NAME).read_text(encoding="utf-8"))
    added = {node: {"why": why, "attempt": attempt, "time_unix_s": round(time.time(), 3)} for node, why in bad.items()}
    write_text(run_dir / EXCLUDED_NAME, json.dumps({**added, **known}, indent=1) + "\n")


def requeue_command(job_id: int | str, exclude: Iterable[str]) -> list[str]:
    """A command for the job itself: back into the queue, to start without the nodes (a plain requeue without any)."""
    nodes = ",".join(sorted(set(exclude)))
    return ["sh", "-c", _REQUEUE, "requeue", str(job_id), nodes] if nodes else ["scontrol", "requeue", str(job_id)]


def sbatch_words(exclude: Iterable[str]) -> list[str]:
    """What a successor's sbatch needs."""
    nodes = ",".join(sorted(set(exclude)))
    return [f"--exclude={nodes}"] if nodes else []


def srun_words(tasks: Mapping[str, int], without: Iterable[str]) -> list[str]:
    """What srun needs inside an allocation of `tasks` by node to leave nodes out; none if it has none of them."""
    left_out = [node for node in tasks if node in set(without)]
    counts = [count for node, count in tasks.items() if node not in left_out]
    if not left_out:
        return []
    words = [f"--nodes={len(counts)}", f"--ntasks={sum(counts)}", f"--exclude={','.join(left_out)}"]
    return [*words, f"--ntasks-per-node={counts[0]}"] if len(set(counts)) == 1 else words


def partition_nodes(partition: str | None) -> list[str]:
    """Names of a partition's nodes (of all partitions without a name); empty if Slurm does not say."""
    options = [] if partition is None else ["--partition", partition]
    with contextlib.suppress(ClusterError, ConfigError):
        lines = call(["sinfo", "--noheader", *options, "--format=%N"]).split()
        return sorted({node for line in lines for node in expand_hostlist(line)})
    return []


def job_exclusions(job_id: str) -> list[str]:
    """Nodes that the job was submitted to keep away from; empty if Slurm does not say."""
    with contextlib.suppress(ClusterError, ConfigError):
        return expand_hostlist(show_job(job_id, patience_s=0).given("ExcNodeList"))
    return []
