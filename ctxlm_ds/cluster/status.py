"""The state of runs, from their run directories and, if there is one, Slurm's queue.

In: run directories. Out: a RunStatus each. It never raises for a damaged run: the field in question says so.
Needs neither torch nor numpy (a login node). Not here: how it is shown (status_view.py), the files (run_files.py).
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctxlm_ds.cluster import run_files as files
from ctxlm_ds.cluster.run_files import NO_WORD, Damaged, Lock, Start, seconds
from ctxlm_ds.cluster.successor import RECORD_NAME
from ctxlm_ds.console import format_duration
from ctxlm_ds.process import run_history as history
from ctxlm_ds.process.run_history import END, FAILURE, GIVE_UP, REQUEUE, START, read_history
from ctxlm_ds.process.run_lock import STALE_AFTER_S

SQUEUE_TIMEOUT_S = 5.0
STALE_S = 2 * STALE_AFTER_S
"""Age at which a heartbeat is stale; clocks of nodes may differ a little."""
SPEED_LINES = 20
LARGEST = 1e18
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED", "STOPPED")
ACTIVE = ("RUNNING", "CONFIGURING", "COMPLETING", "SIGNALING", "STAGE_OUT")
"""Slurm's states."""
COURSE = (START, END, FAILURE, REQUEUE, GIVE_UP)


@dataclass
class RunStatus:
    """Everything known about one run; None if a thing does not apply, `damaged` names what could not be read."""

    run: str
    state: str = "never started"
    """running, starting, restarting, queued, stopped, completed, failed, stale, never started, no such folder."""
    why: str | None = None
    """Reason for that state, if there is one."""
    step: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    eta_s: float | None = None
    checkpoint_step: int | None = None
    checkpoint_age_s: float | None = None
    checkpoint_problem: str | None = None
    restarts: int = 0
    ends: list[str] = field(default_factory=list)
    """Ends of the starts before the present one, oldest first."""
    skips: int = 0
    rollbacks: int = 0
    failed_saves: int = 0
    job_id: str | None = None
    log: str | None = None
    damaged: dict[str, str] = field(default_factory=dict)
    """Files that could not be read, and why."""


def read_statuses(run_dirs: Sequence[Path], queue: Mapping[str, str] | None = None) -> list[RunStatus]:
    """Return the status of each run directory; `queue` has states by job id, None asks squeue if there is one."""
    histories = {run_dir: read_history(run_dir) for run_dir in run_dirs}
    if queue is None:
        queue = ask_queue(job_id for run_dir, events in histories.items() for job_id in _job_ids(run_dir, events))
    return [read_status(run_dir, histories[run_dir], queue) for run_dir in run_dirs]


def read_status(run_dir: Path, events: Sequence[dict[str, Any]], queue: Mapping[str, str]) -> RunStatus:
    """Return the status of one run, from its history and its files."""
    status = RunStatus(str(run_dir))
    if not run_dir.is_dir():
        status.state = "no such folder"
        return status
    if not files.is_run(run_dir):
        return status
    starts = files.list_starts(run_dir, events)
    lock = files.read_lock(run_dir)
    if isinstance(lock, Damaged):
        status.damaged["lock.json"] = lock.why
        lock = None
    _count(status, events)
    _add_checkpoint(status, run_dir)
    _add_progress(status, run_dir, starts[-1] if starts else None)
    begun = files.newest_begun(run_dir)
    held = lock.record.job_id if lock is not None else None
    status.job_id = held or _last_job(events) or (begun.job_id if begun is not None else None)
    status.state, status.why = _state(run_dir, events, starts, lock, queue)
    runs = status.state == "running"
    # A second job that waits in vain for the run's lock has a newer log.
    status.log = starts[-1].log if runs else files.newest_log(run_dir, starts, begun)
    status.ends = [start.ended for start in (starts[:-1] if runs else starts)]
    status.restarts = max(0, len(starts) - (status.state not in ("starting", "restarting")))
    if not runs:
        status.eta_s = None
    if not events and status.state == "stopped" and status.max_steps and status.checkpoint_step == status.max_steps:
        # A run from before there was a history.
        status.state = "completed"
    return status


def ask_queue(job_ids: Iterable[str]) -> dict[str, str]:
    """Return the states of the jobs that squeue knows, by id; empty if there is no Slurm or it does not answer."""
    wanted = sorted({job_id for job_id in job_ids if job_id})
    if not wanted or shutil.which("squeue") is None:
        return {}
    words = ["squeue", "--noheader", "--states=all", "--format=%i|%T|%r", "--jobs=" + ",".join(wanted)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SQUEUE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = (line.split("|") for line in done.stdout.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 3}


def _job_ids(run_dir: Path, events: Sequence[dict[str, Any]]) -> list[str]:
    lock = files.read_lock(run_dir)
    held = lock.record.job_id if isinstance(lock, Lock) else None
    begun = files.newest_begun(run_dir)
    successor = files.read_job_id(run_dir / RECORD_NAME)
    known = (held, _last_job(events), successor, begun.job_id if begun is not None else None)
    return [job_id for job_id in known if job_id]


def _last_job(events: Sequence[dict[str, Any]]) -> str | None:
    return next((str(event["job_id"]) for event in reversed(events) if event.get("job_id")), None)


def _count(status: RunStatus, events: Sequence[dict[str, Any]]) -> None:
    kinds = [event["event"] for event in events]
    status.skips, status.rollbacks = kinds.count(history.SKIP), kinds.count(history.ROLLBACK)
    status.failed_saves = kinds.count(history.SAVE_FAILED)


def _add_checkpoint(status: RunStatus, run_dir: Path) -> None:
    found = files.read_checkpoint(run_dir)
    if isinstance(found, files.Checkpoint):
        status.checkpoint_step, status.checkpoint_problem = found.step, found.problem
        status.checkpoint_age_s = max(0.0, time.time() - found.saved_unix_s)
    elif isinstance(found, Damaged):
        status.damaged["checkpoints"] = found.why


def _add_progress(status: RunStatus, run_dir: Path, start: Start | None) -> None:
    """Fill in step, loss, speed and the time left."""
    settings = files.read_settings(run_dir)
    if isinstance(settings, Damaged):
        status.damaged["config.yaml"] = settings.why
        settings = {}
    status.max_steps = _whole(start.last_step if start is not None else None) or _whole(settings.get("max_steps"))
    lines = files.read_last_lines(run_dir, SPEED_LINES)
    if isinstance(lines, Damaged):
        status.damaged["metrics.jsonl"] = lines.why
        return
    if not lines:
        return
    last = lines[-1]
    status.step, status.loss = last["step"], _number(last.get("loss"))
    status.tokens_per_second = _speed(lines)
    status.eta_s = _time_left(status, last, settings, start, files.metrics_time(run_dir))


def _speed(lines: Sequence[dict[str, Any]]) -> float | None:
    """Return tokens per second over these lines, which may be of several starts: their clock leaves out the gaps."""
    first, last = lines[0], lines[-1]
    tokens, seconds = (_difference(first, last, name) for name in ("tokens", "total_seconds"))
    if tokens is not None and seconds is not None and seconds > 0:
        return tokens / seconds
    return _number(last.get("tokens_per_second"))


def _time_left(
    status: RunStatus, last: dict[str, Any], settings: Mapping[str, Any], start: Start | None, written: float | None
) -> float | None:
    """Return seconds to the nearest limit at the pace since the last start, evaluations and checkpoints included."""
    step_seconds = _number(last.get("step_seconds"))
    if start is not None and written is not None and last["step"] > start.step and written > start.time_unix_s:
        step_seconds = (written - start.time_unix_s) / (last["step"] - start.step)
    if step_seconds is None:
        return None
    steps_left = [] if status.max_steps is None else [float(status.max_steps - last["step"])]
    tokens, most_tokens = _number(last.get("tokens")), _number(settings.get("max_tokens"))
    if tokens and most_tokens:
        steps_left.append((most_tokens - tokens) * last["step"] / tokens)
    return max(0.0, min(steps_left) * step_seconds) if steps_left else None


def _state(
    run_dir: Path,
    events: Sequence[dict[str, Any]],
    starts: Sequence[Start],
    lock: Lock | None,
    queue: Mapping[str, str],
) -> tuple[str, str | None]:
    """Return the state and its reason."""
    course = [event for event in events if event["event"] in COURSE]
    last = course[-1] if course else None
    if lock is not None and not lock.holder_gone and time.time() - lock.heartbeat_unix_s < STALE_S:
        begun = bool(starts) and starts[-1].time_unix_s >= lock.record.acquired_unix_s
        return ("running" if begun else "starting"), None
    if last is not None and last["event"] == END and last.get("completed"):
        return "completed", str(last.get("reason"))
    found = _in_queue(run_dir, course, queue) or _failed_before_its_start(run_dir, last)
    if found is not None:
        return found
    # A killed rank 0 leaves its lock; the end that its job recorded then is newer.
    if lock is not None and (last is None or last["event"] in (START, END) or seconds(last) < lock.heartbeat_unix_s):
        return "stale", _describe_stale(lock)
    if last is None:
        never = ("never started", _only_begun(run_dir))
        return never if files.read_checkpoint(run_dir) is None else ("stopped", None)
    return _state_of(last, starts[-1].ended if starts else NO_WORD)


def _in_queue(
    run_dir: Path, course: Sequence[dict[str, Any]], queue: Mapping[str, str]
) -> tuple[str, str | None] | None:
    """Return the state by Slurm's queue: a job waits to continue, or is between two starts."""
    last = course[-1]["event"] if course else None
    continues = last == FAILURE and not files.is_cancelled_in_order(course[-1])
    states = {job_id: queue[job_id] for job_id in _job_ids(run_dir, course) if job_id in queue}
    for job_id, state in states.items():
        if state in WAITING:
            return "queued", f"job {job_id} is {state.lower()}"
        if state in ACTIVE and (continues or files.has_open_attempt(run_dir, job_id)):
            return ("restarting" if course else "starting"), f"job {job_id} is {state.lower()}"
        if last == REQUEUE and state not in ACTIVE:
            return "stopped", f"requeued, and job {job_id} is {state.lower()} since"
    return None


def _failed_before_its_start(run_dir: Path, last: dict[str, Any] | None) -> tuple[str, str] | None:
    """Return an end without an event: a wrong recipe, a damaged checkpoint, a killed rank without a job around it."""
    attempt = files.newest_attempt(run_dir)
    records = files.attempt_failures(run_dir, attempt) if attempt is not None else []
    # The refusal of a second job is no failure of the run.
    records = [record for record in records if record.error != "RunLockedError"]
    if not records or (last is not None and seconds(last) >= records[0].time_unix_s):
        return None
    return "failed", files.one_line(files.describe_failure(records[0]))


def _state_of(last: dict[str, Any], ended: str) -> tuple[str, str | None]:
    """Return the state after a run's last event; `ended` describes the end of its last start."""
    kind = last["event"]
    if kind == END and not last.get("failed"):
        return "stopped", str(last.get("reason"))
    if kind == REQUEUE:
        # Without Slurm it is unknown whether the job still waits.
        return "queued", f"{last.get('how') or 'requeued'}: {last.get('why')}"
    if files.is_cancelled_in_order(last):
        return "stopped", f"cancelled: {files.one_line(str(last.get('why')))}"
    return "failed", files.one_line(str(last["why"])) if last.get("why") else ended


def _only_begun(run_dir: Path) -> str | None:
    """Describe a run whose ranks have left nothing."""
    begun = files.newest_begun(run_dir)
    if begun is None:
        return None
    age = format_duration(time.time() - begun.time_unix_s)
    where = "; see its log" if begun.log is not None else ""
    return f"job {begun.job_id} began a start {age} ago, and its ranks have left nothing{where}"


def _describe_stale(lock: Lock) -> str:
    holder = lock.record.describe()
    if lock.holder_gone:
        return f"{holder} has ended and recorded no reason"
    minutes = (time.time() - lock.heartbeat_unix_s) / 60
    return f"no heartbeat of {holder} for {minutes:.0f} minutes"


def _number(value: Any) -> float | None:
    """Return a finite number, or None: a file may hold anything."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if is_number else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and _number(value) is not None else None


def _difference(first: dict[str, Any], last: dict[str, Any], name: str) -> float | None:
    begin, end = _number(first.get(name)), _number(last.get(name))
    return None if begin is None or end is None else end - begin
