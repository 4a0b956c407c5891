"""The starts of a run: each one's folder, its outcome, and whether checkpoints make progress.

A start's folder, RUN/attempts/job-<job>-<restart>-<try>, holds start.json from its beginning and end.json from its end;
one without an end was cut short with the job itself. The outcome is also an event of RUN/history.jsonl.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.cluster.rank_output import job_log
from ctxlm_ds.apps.cluster.slurm_commands import named
from ctxlm_ds.atomic import read_object, write_text
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, list_checkpoints
from ctxlm_ds.process.run_history import ATTEMPTS_DIR, END, FAILURE, GIVE_UP, REQUEUE, append_event, read_history

START_FILE = "start.json"
END_FILE = "end.json"
CANCELLED = "the job has been cancelled"
"""`how` of the FAILURE event of a start whose job was cancelled; its exit status is 0 if the ranks saved first."""


@dataclass(frozen=True)
class StartRecord:
    """One start of the ranks, as its start.json holds it."""

    name: str
    chain: str
    """Id of the first job in a line of successors; the count of fruitless starts goes back to its first start."""
    job_id: str
    time_unix_s: float
    checkpoint_step: int | None  # newest checkpoint at the beginning; None if there was none
    nodes: str
    log: str | None = None  # the job's readable log, known before the ranks' START event
    array_task: str | None = None  # name of the job in the queue, as 15_0, if it is a task of an array

    def describe(self) -> str:
        """Describe the checkpoint that the start begins at."""
        step = self.checkpoint_step
        return "no checkpoint yet" if step is None else f"newest checkpoint: step {step}"


def newest_checkpoint(run_dir: Path) -> int | None:
    """Return the step of the newest complete checkpoint; whether it is intact is checked when it is loaded."""
    return max(list_checkpoints(run_dir / CHECKPOINTS_DIR), default=None)


def begin(run_dir: Path, name: str, chain: str, job_id: str, nodes: str) -> StartRecord:
    """Make a start's folder. Raises OSError if the run directory cannot be written."""
    checkpoint, task = newest_checkpoint(run_dir), named(job_id)
    attempt = StartRecord(
        name, chain, job_id, round(time.time(), 6), checkpoint, nodes, job_log(), None if task == job_id else task
    )
    folder = run_dir / ATTEMPTS_DIR / name
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / START_FILE, json.dumps(asdict(attempt), indent=1) + "\n")
    return attempt


def finish(run_dir: Path, attempt: StartRecord, event: str, why: str, **details: Any) -> None:
    """Record the outcome of a start; `event` is FAILURE, REQUEUE, or empty for a complete one."""
    values = {
        "why": why, "attempt": attempt.name, "chain": attempt.chain, "job_id": attempt.job_id,
        "checkpoint_before": attempt.checkpoint_step, "checkpoint_after": newest_checkpoint(run_dir), **details,
    }  # fmt: skip
    if event:
        append_event(run_dir, event, **values)
    try:
        write_text(run_dir / ATTEMPTS_DIR / attempt.name / END_FILE, json.dumps({"event": event, **values}) + "\n")
    except OSError:
        return  # a full disk: the event may have been written; at worst this start counts as cut short


def cut_short(run_dir: Path, chain: str) -> list[StartRecord]:
    """Return the starts of a chain of jobs that have no end, oldest first: their jobs ended with them."""
    found = []
    for path in sorted((run_dir / ATTEMPTS_DIR).glob(f"job-*/{START_FILE}")):
        attempt = read_start_record(path)
        if attempt is not None and attempt.chain == chain and not path.with_name(END_FILE).exists():
            found.append(attempt)
    return sorted(found, key=lambda attempt: attempt.time_unix_s)


def note_cut_short(run_dir: Path, attempt: StartRecord) -> str:
    """Record the outcome of a start whose job could not do so, and return the reason."""
    ends = [event for event in read_history(run_dir) if event["event"] == END and event.get("attempt") == attempt.name]
    if ends and not ends[-1].get("failed", False):
        why = str(ends[-1].get("reason"))
        finish(run_dir, attempt, "" if ends[-1].get("completed") else REQUEUE, why, how="Slurm ended the job")
        return why
    why = "node failure or kill of the job"
    finish(run_dir, attempt, FAILURE, why, exit_status=None, first_rank=None)
    return why


def read_start_record(path: Path) -> StartRecord | None:
    """Read a start.json; None if it is missing or damaged."""
    try:
        return StartRecord(**(read_object(path) or {}))
    except TypeError:
        return None


def fruitless_starts(run_dir: Path, attempt: StartRecord) -> list[dict[str, Any]]:
    """Return the starts in a row before this one that left no new checkpoint, oldest first; none if this one left one.

    Counted over a chain of jobs, for any end of the starts, and from zero after the chain gave up.
    """
    newest = newest_checkpoint(run_dir)
    found: dict[str, dict[str, Any]] = {}
    for event in reversed(read_history(run_dir)):
        if event.get("chain") != attempt.chain or event["event"] not in (FAILURE, REQUEUE, GIVE_UP):
            continue
        moved = event.get("checkpoint_before") != newest or event.get("checkpoint_after") != newest
        if event["event"] == GIVE_UP or moved:
            break
        found.setdefault(str(event.get("attempt")), event)
    return [] if attempt.checkpoint_step != newest else list(found.values())[::-1]
