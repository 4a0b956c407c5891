"""The state of runs, from their run directories and, if there is one, Slurm's queue.

It never raises for a damaged run: the field in question says so. Needs neither torch nor numpy (a login node).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ctxlm_ds.apps.cluster import run_files as files
from ctxlm_ds.apps.cluster.run_files import CONFIG_NAME, NO_WORD, Start, seconds
from ctxlm_ds.apps.cluster.slurm_commands import call
from ctxlm_ds.apps.cluster.start_records import END_FILE, START_FILE
from ctxlm_ds.apps.cluster.successor import RECORD_NAME
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, list_checkpoints
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME, verify
from ctxlm_ds.errors import CheckpointError, ClusterError
from ctxlm_ds.process import run_history as history
from ctxlm_ds.process.line_file import METRICS_NAME
from ctxlm_ds.process.lock_record import LockRecord, look_at_lock, this_process
from ctxlm_ds.process.run_history import END, FAILURE, GIVE_UP, REQUEUE, START, read_failures, read_history, shortened
from ctxlm_ds.process.run_lock import LOCK_NAME, STALE_AFTER_S

T = TypeVar("T")
SQUEUE_TIMEOUT_S = 5.0
STALE_S = 2 * STALE_AFTER_S  # age at which a heartbeat is stale; clocks of nodes may differ a little
LARGEST = 1e18
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED", "STOPPED")
ACTIVE = ("RUNNING", "CONFIGURING", "COMPLETING", "SIGNALING", "STAGE_OUT")  # Slurm's states
COURSE = (START, END, FAILURE, REQUEUE, GIVE_UP)


@dataclass
class RunStatus:
    """Everything known about one run; None if a thing does not apply, `damaged` names what could not be read."""

    run: str
    state: str = "never started"
    """running, starting, restarting, queued, stopped, completed, failed, stale, never started, no such folder."""
    why: str | None = None  # reason for that state, if there is one
    step: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    eta_s: float | None = None
    checkpoint_step: int | None = None
    checkpoint_age_s: float | None = None
    checkpoint_problem: str | None = None
    restarts: int = 0
    ends: list[str] = field(default_factory=list)  # ends of the starts before the present one, oldest first
    skips: int = 0
    rollbacks: int = 0
    failed_saves: int = 0
    job_id: str | None = None
    array_task: str | None = None  # name of the job in the queue, as 15_0, if it is a task of an array
    log: str | None = None
    damaged: dict[str, str] = field(default_factory=dict)  # files that could not be read, and why


@dataclass(frozen=True)
class _Run:
    """The records of a run that its state follows from."""

    run_dir: Path
    events: list[dict[str, Any]]
    starts: list[Start]
    holder: LockRecord | None
    lock_age_s: float
    job_ids: tuple[str, ...]
    """Jobs that the records name: of the lock, of the last event, successor, submitted last, of the newest start."""

    def name_of(self, job_id: str | None) -> str | None:
        """Return a job's name in the queue if it is a task of an array."""
        return next((start.array_task for start in self.starts if job_id and start.job_id == job_id), None)


def read_statuses(run_dirs: Sequence[Path], queue: Mapping[str, str] | None = None) -> list[RunStatus]:
    """Return the status of each run directory; `queue` has states by job id, None asks squeue if there is one."""
    statuses = [RunStatus(str(run_dir)) for run_dir in run_dirs]
    runs = [_read_run(status, run_dir) for status, run_dir in zip(statuses, run_dirs)]  # noqa: B905 (Python 3.9)
    if queue is None:
        queue = ask_queue(job_id for run in runs if run is not None for job_id in run.job_ids)
    for status, run in zip(statuses, runs):  # noqa: B905
        if run is not None:
            _judge(status, run, queue)
    return statuses


def last_trained(starts: Sequence[Start]) -> Start | None:
    """Return the newest start that came as far as training."""
    return next((start for start in reversed(starts) if start.trained), None)


def ask_queue(job_ids: Iterable[str]) -> dict[str, str]:
    """Return the states of the jobs that squeue knows, by id; empty if there is no Slurm or it does not answer."""
    wanted = sorted(set(job_ids))
    # %i of a task of an array is its name, 15_0.
    words = ["squeue", "--noheader", "--states=all", "--array", "--format=%A %T %i", "--jobs=" + ",".join(wanted)]
    try:
        rows = [line.split() for line in call(words, timeout_s=SQUEUE_TIMEOUT_S).splitlines()] if wanted else []
    except ClusterError:
        return {}
    return {name: row[1] for row in rows if len(row) == 3 for name in (row[0], row[2])}


def _read_run(status: RunStatus, run_dir: Path) -> _Run | None:
    """Read a run's records and fill in what does not depend on the queue; None if there is no run."""
    if not run_dir.is_dir():
        status.state = "no such folder"
        return None
    if not files.is_run(run_dir):
        return None
    events = read_history(run_dir)
    starts = files.list_starts(run_dir, events)
    lock = _read(status, LOCK_NAME, lambda: look_at_lock(run_dir / LOCK_NAME))
    if lock is not None and lock.record is None:
        lock, status.damaged[LOCK_NAME] = None, "damaged"
    holder = lock.record if lock is not None else None
    last_job = next((str(event["job_id"]) for event in reversed(events) if event.get("job_id")), None)
    held = holder.job_id if holder is not None else None
    newest = starts[-1] if starts else None
    own = newest.job_id if newest is not None else None
    # A lock that a killed job has left is older than the next start.
    newer = newest is not None and holder is not None and newest.time_unix_s > holder.acquired_unix_s
    status.job_id = (own if newer else held) or own or last_job
    kinds = [event["event"] for event in events]
    status.skips, status.rollbacks = kinds.count(history.SKIP), kinds.count(history.ROLLBACK)
    status.failed_saves = kinds.count(history.SAVE_FAILED)
    _add_checkpoint(status, run_dir)
    _add_progress(status, run_dir, last_trained(starts))
    known = (held, last_job, *(files.read_job_id(run_dir / name) for name in (RECORD_NAME, files.SUBMITTED_NAME)), own)
    age_s = lock.age_s if lock is not None else 0.0
    return _Run(run_dir, events, starts, holder, age_s, tuple(filter(None, known)))


def _read(status: RunStatus, name: str, read: Callable[[], T]) -> T | None:
    """Return what `read` returns; None if the file is missing, or damaged, which the status then says."""
    try:
        return read()
    except FileNotFoundError:
        return None
    except OSError as error:
        status.damaged[name] = error.strerror or "unreadable"
    except (ValueError, TypeError, RecursionError):
        status.damaged[name] = "damaged"
    return None


def _add_checkpoint(status: RunStatus, run_dir: Path) -> None:
    """Fill in the newest checkpoint; sizes of its files are compared, which is fast, not their contents."""
    folders = _read(status, CHECKPOINTS_DIR, lambda: list_checkpoints(run_dir / CHECKPOINTS_DIR))
    if not folders:
        return
    status.checkpoint_step = max(folders)
    folder = folders[status.checkpoint_step]
    saved_unix_s = files.modified_unix_s(folder / MANIFEST_NAME) or files.modified_unix_s(folder)
    status.checkpoint_age_s = max(0.0, time.time() - saved_unix_s)
    try:
        verify(folder, quick=True)
    except CheckpointError as error:
        status.checkpoint_problem = str(error)


def _add_progress(status: RunStatus, run_dir: Path, start: Start | None) -> None:
    settings = _read(status, CONFIG_NAME, lambda: files.read_training_settings(run_dir)) or {}
    status.max_steps = _whole(start.last_step if start is not None else None) or _whole(settings.get("max_steps"))
    last = _read(status, METRICS_NAME, lambda: files.read_last_step(run_dir))
    if last is None:
        return
    # Steps between two lines are saved at a stop, too.
    saved = start.end_step if start is not None else None
    status.step, status.loss = max(last["step"], saved or 0), _number(last.get("loss"))
    status.tokens_per_second = _number(last.get("tokens_per_second"))
    status.eta_s = _time_left(status, last, settings, _pace(run_dir, start, last))


def _pace(run_dir: Path, start: Start | None, last: dict[str, Any]) -> float | None:
    """Return seconds a step since the start, evaluations and checkpoints included, but not its first step (warm-up).

    The first line of metrics.jsonl since the start, which that step is part of, is left out; None if it is the only
    one.
    """
    written_unix_s = files.modified_unix_s(run_dir / METRICS_NAME)
    if start is None or last["step"] <= start.step or written_unix_s <= start.time_unix_s:
        return _number(last.get("step_seconds"))
    passed_s, step = written_unix_s - start.time_unix_s, start.step
    try:
        first = files.read_first_step(run_dir, start.step)
    except OSError:
        first = None
    step_s = None if first is None else _number(first.get("step_seconds"))
    if first is not None and step_s is not None:
        passed_s, step = passed_s - step_s * (first["step"] - step), first["step"]
    return passed_s / (last["step"] - step) if last["step"] > step and passed_s > 0 else None


def _time_left(
    status: RunStatus, last: dict[str, Any], settings: Mapping[str, Any], step_seconds: float | None
) -> float | None:
    """Return seconds to the nearest limit at this pace; None if it is unknown."""
    if step_seconds is None:
        return None
    steps_left = [] if status.max_steps is None else [float(status.max_steps - last["step"])]
    tokens, most_tokens = _number(last.get("tokens")), _number(settings.get("max_tokens"))
    if tokens and most_tokens:
        steps_left.append((most_tokens - tokens) * last["step"] / tokens)
    return max(0.0, min(steps_left) * step_seconds) if steps_left else None


def _judge(status: RunStatus, run: _Run, queue: Mapping[str, str]) -> None:
    status.state, status.why = _state(status, run, queue)
    starts, runs, begins = run.starts, status.state == "running", status.state in ("starting", "restarting")
    present = last_trained(starts) if runs else starts[-1] if begins and starts and starts[-1].is_open else None
    if runs and run.holder is not None:
        status.job_id = run.holder.job_id or status.job_id
    status.array_task = run.name_of(status.job_id)
    shown = present or (starts[-1] if starts else None)
    status.log = shown.log if shown is not None else None
    status.ends = [start.ended for start in starts if start is not present]
    status.restarts = max(0, len(starts) - (present is not None or not begins))
    if not runs:
        status.eta_s = None


def _state(status: RunStatus, run: _Run, queue: Mapping[str, str]) -> tuple[str, str | None]:
    course = [event for event in run.events if event["event"] in COURSE]
    last = course[-1] if course else None
    holder, ended = run.holder, False
    if holder is not None:
        ended = holder.same_machine(this_process()) and holder.has_ended()
        if not ended and run.lock_age_s < STALE_S:
            newest = last_trained(run.starts)
            begun = newest is not None and newest.time_unix_s >= holder.acquired_unix_s
            return ("running" if begun else "starting"), None
    if last is not None and last["event"] == END and last.get("completed"):
        begins_again = run.starts[-1].is_open and run.starts[-1].time_unix_s > seconds(last) if run.starts else False
        found = _in_queue(run, course, queue) if begins_again else None
        return found or ("completed", str(last.get("reason")))
    found = _in_queue(run, course, queue) or _failed_before_its_start(run.run_dir, last)
    if found is not None:
        return found
    # A killed rank 0 leaves its lock; the end that its job recorded then is newer.
    if holder is not None and (
        last is None or last["event"] in (START, END) or seconds(last) < time.time() - run.lock_age_s
    ):
        silence = f"no heartbeat of {holder.describe()} for {run.lock_age_s / 60:.0f} minutes"
        return "stale", f"{holder.describe()} has ended and recorded no reason" if ended else silence
    if last is None:
        return "never started" if status.checkpoint_step is None else "stopped", None
    return _state_after(run.run_dir, last, run.starts[-1].ended if run.starts else NO_WORD)


def _in_queue(run: _Run, course: Sequence[dict[str, Any]], queue: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the state by Slurm's queue: a job waits to continue, or is between two starts."""
    last = course[-1]["event"] if course else None
    continues = last == FAILURE and not files.is_cancelled_in_order(course[-1])
    # A successor or a new job waits while the one before has ended.
    for job_id in sorted(run.job_ids, key=lambda one: queue.get(one) not in WAITING):
        state = queue.get(job_id, "")
        why = f"job {run.name_of(job_id) or job_id} is {state.lower()}"
        if state in WAITING:
            return "queued", why
        begun = (run.run_dir / history.ATTEMPTS_DIR).glob(f"job-{job_id}-*/{START_FILE}")
        if state in ACTIVE and (continues or not all(path.with_name(END_FILE).exists() for path in begun)):
            return ("restarting" if course else "starting"), why
        if state and last == REQUEUE and state not in ACTIVE:
            return "stopped", f"requeued, and {why} since"
    return None


def _failed_before_its_start(run_dir: Path, last: dict[str, Any] | None) -> tuple[str, str] | None:
    """Return an end without an event: a wrong recipe, a damaged checkpoint, a killed rank without a job around it."""
    attempt = files.newest_attempt(run_dir)
    if attempt is None:
        return None
    folder = run_dir / history.ATTEMPTS_DIR / attempt
    # The refusal of a second job is no failure of the run.
    records = [record for record in read_failures(folder) if record.error != "RunLockedError"]
    if not records or (last is not None and seconds(last) >= records[0].time_unix_s):
        return None
    return "failed", files.explain_failure(records[0])


def _state_after(run_dir: Path, last: dict[str, Any], ended: str) -> tuple[str, str | None]:
    """Return the state after a run's last event; `ended` describes the end of its last start."""
    if last["event"] == END and not last.get("failed"):
        return "stopped", str(last.get("reason"))
    if last["event"] == REQUEUE:
        # Without Slurm it is unknown whether the job still waits.
        return "queued", f"{last.get('how') or 'requeued'}: {last.get('why')}"
    if files.is_cancelled_in_order(last):
        return "stopped", f"cancelled: {shortened(str(last.get('why')))}"
    if not last.get("why"):
        return "failed", ended
    why, attempt = str(last["why"]), last.get("attempt")
    if last["event"] == FAILURE and isinstance(attempt, str):
        whole = files.whole_reason(run_dir / history.ATTEMPTS_DIR / attempt, why)
        return "failed", whole if whole != why else shortened(why)
    return "failed", shortened(why)


def _number(value: Any) -> float | None:
    """Return a finite number, or None: a file may hold anything."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if is_number else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and _number(value) is not None else None
