"""Files of a run directory, read for its status: the last metrics, the recipe's limits, the starts and their ends.

A file that cannot be read is an OSError or a ValueError. Needs neither torch nor numpy, and writes nothing.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.cluster.start_records import CANCELLED, END_FILE, START_FILE, StartRecord, read_start_record
from ctxlm_ds.apps.cluster.sweep import SWEEP_NAME
from ctxlm_ds.atomic import read_object
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR
from ctxlm_ds.process import run_history as history
from ctxlm_ds.process.line_file import METRICS_NAME
from ctxlm_ds.process.run_history import ATTEMPTS_DIR, FailureRecord, read_failures, shortened
from ctxlm_ds.process.run_lock import LOCK_NAME
from ctxlm_ds.process.stacks import ALL_STACKS_NAME
from ctxlm_ds.untrusted_json import open_regular

CONFIG_NAME = "config.yaml"
SUBMITTED_NAME = "submitted.json"  # names the job that `ctxlm submit` queued last
TAIL_BYTES = 1 << 19
RUN_FILES = (history.HISTORY_NAME, METRICS_NAME, LOCK_NAME, ATTEMPTS_DIR, CHECKPOINTS_DIR, SUBMITTED_NAME)
NO_WORD = "ended without a record (killed, or its node was lost)"


@dataclass(frozen=True)
class Start:
    """One start of a run's ranks."""

    time_unix_s: float
    step: int
    last_step: int | None
    end_step: int | None  # saved at its end; None if it did not end in order
    log: str | None
    ended: str  # why the start ended; for the last start, why it did if it has ended
    job_id: str | None
    array_task: str | None
    trained: bool  # it came as far as training
    is_open: bool  # a job's start without an end on record


def is_run(folder: Path) -> bool:
    """Return whether a folder holds anything of a run."""
    return any((folder / name).exists() for name in RUN_FILES)


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """Return run directories, each once: a pattern's matches, and the runs in a folder that is not a run.

    The shell expands a pattern, too: of several paths those that are no folders are left out, but not those that are
    missing.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        for path in [Path(match) for match in sorted(glob.glob(pattern))] or [Path(pattern)]:
            found.update(dict.fromkeys(_runs_below(path) or [path]))
    return [path for path in found if path.is_dir() or not path.exists()] or list(found)


def _runs_below(folder: Path) -> list[Path]:
    """Return the runs in a folder that is not a run; those of a sweep also before they have begun."""
    if is_run(folder):
        return []
    sweep = (folder / SWEEP_NAME).is_file()
    return [child for child in sorted(folder.glob("*")) if is_run(child) or (sweep and child.name.isdigit())]


def read_last_step(run_dir: Path) -> dict[str, Any] | None:
    """Read the last training line of metrics.jsonl from its end: it may have many gigabytes; None before the first.

    Lines of evaluations and torn lines are passed over. Raises ValueError if the file has no line, and is not empty.
    """
    evaluated = False
    with open_regular(run_dir / METRICS_NAME) as handle:
        size = os.fstat(handle.fileno()).st_size
        handle.seek(max(0, size - TAIL_BYTES))
        for line in reversed(handle.read(TAIL_BYTES).split(b"\n")):
            with contextlib.suppress(ValueError, RecursionError):
                values = json.loads(line)
                if isinstance(values, dict) and isinstance(values.get("step"), int):
                    if "loss" in values:
                        return values
                    evaluated = True
    if size and not evaluated:
        raise ValueError("no line of figures")
    return None


def read_first_step(run_dir: Path, after: int) -> dict[str, Any] | None:
    """Read the first training line after a step, None if it may be before the end of metrics.jsonl that is read.

    Raises OSError if the file cannot be read.
    """
    with open_regular(run_dir / METRICS_NAME) as handle:
        begin = max(0, os.fstat(handle.fileno()).st_size - TAIL_BYTES)
        handle.seek(begin)
        lines, seen = handle.read(TAIL_BYTES).split(b"\n"), begin == 0
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            values = json.loads(line)
            if isinstance(values, dict) and isinstance(values.get("step"), int):
                if values["step"] > after and "loss" in values:
                    return values if seen else None
                seen = seen or values["step"] <= after
    return None


def read_training_settings(run_dir: Path) -> dict[str, Any]:
    """Read the `training` section of the resolved recipe; empty without PyYAML."""
    try:
        import yaml
    except ImportError:
        return {}
    with open_regular(run_dir / CONFIG_NAME) as handle:
        text = handle.read(TAIL_BYTES)
    try:
        # PyYAML's parser in C, if it has one, is ten times as fast.
        return dict(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))["training"])
    except (yaml.YAMLError, KeyError) as error:
        raise ValueError(str(error)) from None


def modified_unix_s(path: Path) -> float:
    """Return the time of a file's last change; 0 if it is missing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def newest_attempt(run_dir: Path) -> str | None:
    """Return the start whose folder changed last."""
    try:
        folders = [path for path in (run_dir / ATTEMPTS_DIR).iterdir() if path.is_dir()]
    except OSError:
        return None
    return max(folders, key=modified_unix_s).name if folders else None


def read_job_id(path: Path) -> str | None:
    """Read the id of the job that a record (the lock, a successor's, a start's) names."""
    job_id = (read_object(path) or {}).get("job_id")
    return None if job_id is None else str(job_id)


def list_starts(run_dir: Path, events: Sequence[dict[str, Any]]) -> list[Start]:
    """Return every start, oldest first, also those of jobs that ended before training."""
    events = _with_early_ends(run_dir, events)
    begins = [index for index, event in enumerate(events) if event["event"] == history.START]
    return [
        _start(run_dir, events[begin:end], seconds(events[end]) if end < len(events) else math.inf)
        for begin, end in zip(begins, [*begins[1:], len(events)])  # noqa: B905 (Python 3.9 runs this on login nodes)
    ]


def _with_early_ends(run_dir: Path, events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add a START event for each start.json whose ranks have written none (yet)."""
    trained = {str(event.get("attempt")) for event in events if event["event"] == history.START}
    found = list(events)
    for path in (run_dir / ATTEMPTS_DIR).glob(f"*/{START_FILE}"):
        record = None if path.parent.name in trained else read_start_record(path)
        if record is None or not isinstance(record.time_unix_s, (int, float)) or was_refused(path.parent):
            continue
        before = (number for number, event in enumerate(found) if seconds(event) > record.time_unix_s)
        found.insert(next(before, len(found)), _early_start(record, path.parent.name))
    return found


def _early_start(record: StartRecord, attempt: str) -> dict[str, Any]:
    values = {"log": record.log, "job_id": record.job_id, "attempt": attempt, "trained": False}
    return {"time_unix_s": record.time_unix_s, "event": history.START, **values}


def was_refused(folder: Path) -> bool:
    """Return whether a start found another job's lock, which is no failure of the run."""
    records = read_failures(folder)
    return bool(records) and all(record.error == "RunLockedError" for record in records)


def _start(run_dir: Path, events: Sequence[dict[str, Any]], next_s: float) -> Start:
    first = events[0]
    attempt = str(first.get("attempt") or history.DEFAULT_ATTEMPT)
    folder = run_dir / ATTEMPTS_DIR / attempt
    record = read_start_record(folder / START_FILE)
    # Starts by hand share a folder.
    records = [one for one in read_failures(folder) if seconds(first) <= one.time_unix_s < next_s]
    return Start(
        time_unix_s=seconds(first),
        step=first["step"] if isinstance(first.get("step"), int) else 0,
        last_step=first["last_step"] if isinstance(first.get("last_step"), int) else None,
        end_step=_end_step(events[1:]),
        log=str(first["log"]) if first.get("log") else None,
        ended=_describe_end(folder, records, events[1:]),
        job_id=str(first["job_id"]) if first.get("job_id") else None,
        array_task=str(record.array_task) if record is not None and record.array_task else None,
        trained=first.get("trained") is not False,
        is_open=(folder / START_FILE).is_file() and not (folder / END_FILE).exists(),
    )


def _end_step(after: Sequence[dict[str, Any]]) -> int | None:
    end = next((event for event in after if event["event"] == history.END and not event.get("failed")), {})
    return end["step"] if isinstance(end.get("step"), int) else None


def _describe_end(folder: Path, records: Sequence[FailureRecord], after: Sequence[dict[str, Any]]) -> str:
    """Describe an end by the job's event, else by the ranks' records, else by rank 0's event."""
    kinds = (history.FAILURE, history.REQUEUE)
    noted = [event for event in after if event["event"] in kinds and event.get("attempt") == folder.name]
    gave_up = any(event["event"] == history.GIVE_UP for event in after)
    requeued = any(event["event"] == history.REQUEUE for event in noted)
    cancelled = any(is_cancelled_in_order(event) for event in noted)
    tail = "; the job gave up" if gave_up else "; requeued" if requeued else "; cancelled" if cancelled else ""
    end = next((event for event in after if event["event"] == history.END), None)
    if noted:
        return shortened(whole_reason(folder, str(noted[0].get("why") or "failed"))) + tail
    if records and (end is None or end.get("failed")):
        stacks = f" ({folder / ALL_STACKS_NAME})" if records[0].error == "Hang" else ""
        return describe_failure(records[0]) + stacks + tail
    return (NO_WORD if end is None else shortened(str(end.get("reason")))) + tail


def is_cancelled_in_order(event: dict[str, Any]) -> bool:
    """Return whether an event is the end of a job that was cancelled after its ranks had saved and stopped."""
    return event["event"] == history.FAILURE and event.get("how") == CANCELLED and event.get("exit_status") == 0


def describe_failure(record: FailureRecord) -> str:
    """Describe a failure by rank, host and error in one line."""
    return shortened(_whole_failure(record))


def explain_failure(record: FailureRecord) -> str:
    """Describe a user's mistake by all its lines, an error with a traceback in one: below it is what libraries add."""
    return describe_failure(record) if record.traceback else _whole_failure(record)


def whole_reason(folder: Path, why: str) -> str:
    """Return all lines of the user's mistake whose first line a job has recorded as a start's reason."""
    whole = (_whole_failure(record) for record in read_failures(folder) if not record.traceback)
    return next((text for text in whole if text.splitlines()[0] == why), why)


def _whole_failure(record: FailureRecord) -> str:
    return f"rank {record.rank} on {record.host}: {record.error}: {str(record.message).strip()}"


def seconds(event: dict[str, Any]) -> float:
    """Return the time of an event."""
    value = event.get("time_unix_s")
    return float(value) if isinstance(value, (int, float)) else 0.0
