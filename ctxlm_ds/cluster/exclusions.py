"""Nodes that a run keeps away from: RUN/excluded_nodes.json, and the words that tell Slurm.

In: nodes that a preflight found bad. Out: the list that later starts read, commands for scontrol, sbatch and srun.
Needs the standard library only. Not here: finding bad nodes (preflight.py), when to requeue (the job).

Slurm takes a new list of excluded nodes for pending jobs alone. A job that has just requeued itself counts as one, but
its processes are sent SIGTERM at once, so the command that does both ignores that signal (Slurm 22.05).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import write_text
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.process.slurm import expand_hostlist

EXCLUDED_NAME = "excluded_nodes.json"
ASK_SLURM_S = 30.0
_REQUEUE = """trap '' TERM USR1
scontrol requeue "$1" || exit
for _ in 1 2 3 4 5; do scontrol update JobId="$1" ExcNodeList="$2" && exit; sleep 0.5; done
exit 1"""


def excluded_nodes(run_dir: Path) -> dict[str, str]:
    """Excluded nodes and why; empty where none are, or the file cannot be read. Removing the file lets all in again."""
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
    now_s = round(time.time(), 3)
    added = {node: {"why": why, "attempt": attempt, "time_unix_s": now_s} for node, why in bad.items()}
    write_text(run_dir / EXCLUDED_NAME, json.dumps({**added, **known}, indent=1) + "\n")


def requeue_command(job_id: int | str, exclude: Iterable[str]) -> list[str]:
    """A command for the job itself: back into the queue, to start without the nodes (a plain requeue without any)."""
    nodes = ",".join(sorted(set(exclude)))
    if not nodes:
        return ["scontrol", "requeue", str(job_id)]
    return ["sh", "-c", _REQUEUE, "requeue", str(job_id), nodes]


def sbatch_words(exclude: Iterable[str]) -> list[str]:
    """What a successor's sbatch needs."""
    nodes = ",".join(sorted(set(exclude)))
    return [f"--exclude={nodes}"] if nodes else []


def srun_words(tasks: Mapping[str, int], without: Iterable[str]) -> list[str]:
    """What srun needs inside an allocation to leave nodes out; none where nothing is left out.

    Args:
        tasks: tasks of each node of the allocation.
        without: nodes to leave out; others than the allocation's are passed over.
    """
    left_out = [node for node in tasks if node in set(without)]
    kept = {node: count for node, count in tasks.items() if node not in left_out}
    if not left_out:
        return []
    words = [f"--nodes={len(kept)}", f"--ntasks={sum(kept.values())}", f"--exclude={','.join(left_out)}"]
    return [*words, f"--ntasks-per-node={max(kept.values())}"] if len(set(kept.values())) == 1 else words


def partition_nodes(partition: str | None) -> list[str]:
    """Names of a partition's nodes (of all partitions without a name); empty where Slurm does not say."""
    where = [] if partition is None else ["--partition", partition]
    return _node_list(["sinfo", "--noheader", *where, "--format=%N"])


def job_exclusions(job_id: int | str) -> list[str]:
    """Nodes that the job was submitted to keep away from; empty where Slurm does not say."""
    for word in _ask_slurm(["scontrol", "-o", "show", "job", str(job_id)]).split():
        name, _, value = word.partition("=")
        if name == "ExcNodeList" and value != "(null)":
            return _expand(value)
    return []


def _node_list(command: list[str]) -> list[str]:
    return sorted({node for line in _ask_slurm(command).split() for node in _expand(line)})


def _expand(text: str) -> list[str]:
    try:
        return expand_hostlist(text)
    except ConfigError:
        return []


def _ask_slurm(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SLURM_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
