"""The starts of a run: each one's folder, its outcome, and whether checkpoints make progress.

A start's folder, RUN/attempts/job-<job>-<restart>-<try>, holds start.json from its beginning. Its outcome is an event
of RUN/history.jsonl; a start without one was cut short with the job itself.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.cluster.rank_output import job_log
from ctxlm_ds.apps.cluster.slurm_commands import named
from ctxlm_ds.atomic import read_object, write_text
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, list_checkpoints
from ctxlm_ds.process.run_files import update_status
from ctxlm_ds.process.run_history import ATTEMPTS_DIR, END, FAILURE, GIVE_UP, REQUEUE, append_event, read_history

START_FILE = "start.json"
CANCELLED = "the job has been cancelled"
"""`how` of the FAILURE event of a start whose job was cancelled; its exit status is 0 if the ranks saved first."""


@dataclass(frozen=True)
class StartRecord:
    """One start of the ranks, as its start.json holds it."""

    name: str
    job_id: str
    time_unix_s: float
    checkpoint_step: int | None  # newest checkpoint at the beginning; None if there was none
    nodes: str

    def describe(self) -> str:
        """Describe the checkpoint that the start begins at."""
        step = self.checkpoint_step
        return "no checkpoint yet" if step is None else f"newest checkpoint: step {step}"


def newest_checkpoint(run_dir: Path) -> int | None:
    """Return the step of the newest complete checkpoint; whether it is intact is checked when it is loaded."""
    return max(list_checkpoints(run_dir / CHECKPOINTS_DIR), default=None)


def begin(run_dir: Path, name: str, job_id: str, nodes: str) -> StartRecord:
    """Make a start's folder. Raises OSError if the run directory cannot be written."""
    attempt = StartRecord(name, job_id, round(time.time(), 6), newest_checkpoint(run_dir), nodes)
    folder = run_dir / ATTEMPTS_DIR / name
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / START_FILE, json.dumps(asdict(attempt), indent=1) + "\n")
    update_status(run_dir, state="starting", why=None, job_id=named(job_id), attempt=name, log=job_log(), left_s=None)
    return attempt


def finish(run_dir: Path, attempt: StartRecord, event: str, why: str, **details: Any) -> None:
    """Record the outcome of a start: FAILURE or REQUEUE."""
    how, stopped = details.get("how"), details.get("how") == CANCELLED and not details.get("exit_status")
    append_event(
        run_dir, event, why=why, attempt=attempt.name, job_id=attempt.job_id, checkpoint_before=attempt.checkpoint_step,
        checkpoint_after=newest_checkpoint(run_dir), **details,
    )  # fmt: skip
    state = "queued" if event == REQUEUE else "stopped" if stopped else "failed"
    failure = {"last_failure": why} if state == "failed" else {}
    update_status(run_dir, state=state, why=f"{how}: {why}" if how else why, left_s=None, **failure)


def list_starts(run_dir: Path) -> list[StartRecord]:
    """Return the starts with an intact record, oldest first."""
    found, known = [], {field.name for field in fields(StartRecord)}
    for path in (run_dir / ATTEMPTS_DIR).glob(f"job-*/{START_FILE}"):
        values = {name: value for name, value in (read_object(path) or {}).items() if name in known}
        if len(values) == len(known) and isinstance(values["time_unix_s"], (int, float)):
            found.append(StartRecord(**values))
    return sorted(found, key=lambda attempt: attempt.time_unix_s)


def cut_short(run_dir: Path, job_id: str) -> list[StartRecord]:
    """Return the starts of a job that have no outcome, oldest first: Slurm ended the job with them."""
    events = read_history(run_dir)
    over = {event.get("attempt") for event in events if event["event"] in (FAILURE, REQUEUE) or event.get("completed")}
    return [attempt for attempt in list_starts(run_dir) if attempt.job_id == job_id and attempt.name not in over]


def note_cut_short(run_dir: Path, attempt: StartRecord) -> str:
    """Record the outcome of a start whose job could not do so, and return the reason."""
    ends = [event for event in read_history(run_dir) if event["event"] == END and event.get("attempt") == attempt.name]
    if ends and not ends[-1].get("failed", False):
        why = str(ends[-1].get("reason"))
        finish(run_dir, attempt, REQUEUE, why, how="Slurm ended the job")
    else:
        why = "node failure or kill of the job"
        finish(run_dir, attempt, FAILURE, why, exit_status=None, first_rank=None)
    return why


def fruitless_starts(run_dir: Path, attempt: StartRecord) -> list[dict[str, Any]]:
    """Return the starts in a row before this one that left no new checkpoint, oldest first; none if this one left one.

    Counted over all starts of a job, for any end, and from zero after the job gave up.
    """
    newest = newest_checkpoint(run_dir)
    found: dict[str, dict[str, Any]] = {}
    for event in reversed(read_history(run_dir)):
        if event.get("job_id") != attempt.job_id or event["event"] not in (FAILURE, REQUEUE, GIVE_UP):
            continue
        moved = event.get("checkpoint_before") != newest or event.get("checkpoint_after") != newest
        if event["event"] == GIVE_UP or moved:
            break
        found.setdefault(str(event.get("attempt")), event)
    return [] if attempt.checkpoint_step != newest else list(found.values())[::-1]
