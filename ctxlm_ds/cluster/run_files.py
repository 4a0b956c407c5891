"""Files of a run directory, read for its status: the lock, the last metrics, the checkpoints, the starts' records.

In: paths. Out: plain values, None for a missing file, a Damaged for one that cannot be read; no state of a file raises.
Needs neither torch nor numpy, and writes nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import read_object
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, list_checkpoints
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME, verify
from ctxlm_ds.cluster.start_records import CANCELLED, END_FILE, START_FILE, StartRecord, read_start_record
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.process import run_history as history
from ctxlm_ds.process.lock_record import LockRecord, process_start_ticks, this_process
from ctxlm_ds.process.run_history import ATTEMPTS_DIR, FailureRecord, read_failures, shortened
from ctxlm_ds.process.run_lock import LOCK_NAME
from ctxlm_ds.untrusted_json import open_regular, read_text

METRICS_NAME = "metrics.jsonl"
CONFIG_NAME = "config.yaml"
STACKS_NAME = "stacks.txt"
TAIL_BYTES = 1 << 16
MOST_TAIL_BYTES = 1 << 22
LATEST_UNIX_S = 1e18
RUN_FILES = (history.HISTORY_NAME, METRICS_NAME, LOCK_NAME, ATTEMPTS_DIR, CHECKPOINTS_DIR)
SHOWN_CHARACTERS = 200
NO_WORD = "ended without a record (killed, or its node was lost)"


@dataclass(frozen=True)
class Damaged:
    """A file that exists and cannot be read."""

    why: str


@dataclass(frozen=True)
class Lock:
    """The run directory's lock as one look found it."""

    record: LockRecord
    heartbeat_unix_s: float
    holder_gone: bool
    """True if this is the holder's machine and its process has ended."""


@dataclass(frozen=True)
class Checkpoint:
    """The newest checkpoint."""

    step: int
    saved_unix_s: float
    problem: str | None
    """None if its manifest exists and every file has the size that it says."""


@dataclass(frozen=True)
class Start:
    """One start of a run's ranks that reached training."""

    time_unix_s: float
    step: int
    last_step: int | None
    attempt: str
    log: str | None
    ended: str
    """Why the start ended; for the last start, why it did if it has ended."""


def is_run(folder: Path) -> bool:
    """Return whether a folder holds anything of a run."""
    return any((folder / name).exists() for name in RUN_FILES)


def read_lock(run_dir: Path) -> Lock | Damaged | None:
    """Read who holds the run."""
    try:
        # Opened, so that a network file system asks its server for the time of the last heartbeat.
        with open_regular(run_dir / LOCK_NAME) as handle:
            heartbeat_unix_s = os.fstat(handle.fileno()).st_mtime
            record = LockRecord(**json.loads(handle.read(TAIL_BYTES)))
        numbers = isinstance(record.pid, int) and isinstance(record.acquired_unix_s, (int, float))
        if not numbers or not isinstance(record.job_id, (str, type(None))):
            return Damaged("damaged")
        gone = record.same_machine(this_process()) and process_start_ticks(record.pid) != record.process_start_ticks
    except FileNotFoundError:
        return None
    except OSError as error:
        return Damaged(error.strerror or "unreadable")
    except (ValueError, TypeError, RecursionError):
        return Damaged("damaged")
    return Lock(record, heartbeat_unix_s, gone)


def read_last_lines(run_dir: Path, count: int) -> list[dict[str, Any]] | Damaged:
    """Read the last training lines of metrics.jsonl, oldest first, from its end: it may have many gigabytes."""
    path, found = run_dir / METRICS_NAME, []
    try:
        for line in _lines_backwards(path):
            values = _training_line(line)
            found += [] if values is None else [values]
            if len(found) == count:
                break
        empty = path.stat().st_size == 0
    except FileNotFoundError:
        return []
    except OSError as error:
        return Damaged(error.strerror or "unreadable")
    return found[::-1] if found or empty else Damaged("damaged")


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield lines from the last to the first, within a bound; an incomplete first piece is left out."""
    with open_regular(path) as handle:
        end = os.fstat(handle.fileno()).st_size
        lowest = max(0, end - MOST_TAIL_BYTES)
        rest = b""
        while end > lowest:
            begin = max(lowest, end - TAIL_BYTES)
            handle.seek(begin)
            first, *lines = (handle.read(end - begin) + rest).split(b"\n")
            yield from reversed(lines)
            rest, end = first, begin
        if lowest == 0:
            yield rest


def _training_line(line: bytes) -> dict[str, Any] | None:
    """Parse the line of a training step; None for an evaluation, and for a torn or damaged line."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    complete = isinstance(values, dict) and isinstance(values.get("step"), int) and "loss" in values
    return values if complete else None


def metrics_time(run_dir: Path) -> float | None:
    """Return the time of the last line of metrics.jsonl."""
    return _time_of(run_dir / METRICS_NAME) or None


def read_settings(run_dir: Path) -> dict[str, Any] | Damaged:
    """Read the `training` section of the resolved recipe; empty if there is none yet, or no PyYAML."""
    try:
        import yaml
    except ImportError:
        return {}
    path = run_dir / CONFIG_NAME
    if not path.exists():
        return {}
    try:
        # PyYAML's parser in C, if it has one, is ten times as fast.
        document = yaml.load(read_text(path, max_bytes=MOST_TAIL_BYTES), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (ValueError, yaml.YAMLError, RecursionError):
        return Damaged("damaged" if path.is_file() else "unreadable")
    training = document.get("training") if isinstance(document, dict) else None
    return training if isinstance(training, dict) else Damaged("damaged")


def read_checkpoint(run_dir: Path) -> Checkpoint | Damaged | None:
    """Read the newest checkpoint; sizes of its files are compared, which is fast, not their contents."""
    try:
        folders = list_checkpoints(run_dir / CHECKPOINTS_DIR)
    except OSError as error:
        return Damaged(error.strerror or "unreadable")
    if not folders:
        return None
    step = max(folders)
    problem = None
    try:
        verify(folders[step], quick=True)
    except CheckpointError as error:
        problem = str(error)
    return Checkpoint(step, _time_of(folders[step] / MANIFEST_NAME) or _time_of(folders[step]), problem)


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def attempt_failures(run_dir: Path, attempt: str) -> list[FailureRecord]:
    """Read the failure records of one start, the likely cause first."""
    return read_failures(run_dir / ATTEMPTS_DIR / attempt)


def newest_attempt(run_dir: Path) -> str | None:
    """Return the start whose folder changed last."""
    try:
        folders = [path for path in (run_dir / ATTEMPTS_DIR).iterdir() if path.is_dir()]
    except OSError:
        return None
    return max(folders, key=_time_of).name if folders else None


def newest_begun(run_dir: Path) -> StartRecord | None:
    """Read the record that a job wrote when it began the newest start; None for a start by hand or a damaged record."""
    name = newest_attempt(run_dir)
    found = read_start_record(run_dir / ATTEMPTS_DIR / name / START_FILE) if name is not None else None
    if found is None or found.name != name or not isinstance(found.time_unix_s, (int, float)):
        return None
    texts = isinstance(found.job_id, str) and isinstance(found.log, (str, type(None)))
    return found if texts and 0 <= found.time_unix_s < LATEST_UNIX_S else None


def read_job_id(path: Path) -> str | None:
    """Read the id of the job that a record (the lock, a successor's, a start's) names."""
    job_id = (read_object(path) or {}).get("job_id")
    return None if job_id is None else str(job_id)


def has_open_attempt(run_dir: Path, job_id: str) -> bool:
    """Return whether a job has begun a start and not recorded its end."""
    folders = (run_dir / ATTEMPTS_DIR).glob(f"job-{job_id}-*")
    return any((path / START_FILE).exists() and not (path / END_FILE).exists() for path in folders)


def list_starts(run_dir: Path, events: Sequence[dict[str, Any]]) -> list[Start]:
    """Return every start, oldest first."""
    begins = [index for index, event in enumerate(events) if event["event"] == history.START]
    return [
        _start(run_dir, events[begin:end], seconds(events[end]) if end < len(events) else math.inf)
        for begin, end in zip(begins, [*begins[1:], len(events)])  # noqa: B905 (Python 3.9 runs this on login nodes)
    ]


def _start(run_dir: Path, events: Sequence[dict[str, Any]], next_s: float) -> Start:
    """Build a start from its event and those before the next one's, which came at `next_s`."""
    first = events[0]
    attempt = str(first.get("attempt") or history.DEFAULT_ATTEMPT)
    # Starts by hand share a folder.
    records = [one for one in attempt_failures(run_dir, attempt) if seconds(first) <= one.time_unix_s < next_s]
    return Start(
        time_unix_s=seconds(first),
        step=first["step"] if isinstance(first.get("step"), int) else 0,
        last_step=first["last_step"] if isinstance(first.get("last_step"), int) else None,
        attempt=attempt,
        log=str(first["log"]) if first.get("log") else _output(run_dir, attempt),
        ended=_describe_end(run_dir / ATTEMPTS_DIR / attempt, records, events[1:]),
    )


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
        return one_line(str(noted[0].get("why") or "failed")) + tail
    if records and (end is None or end.get("failed")):
        stacks = f" ({folder / STACKS_NAME})" if records[0].error == "Hang" else ""
        return one_line(describe_failure(records[0])) + stacks + tail
    return (NO_WORD if end is None else one_line(str(end.get("reason")))) + tail


def is_cancelled_in_order(event: dict[str, Any]) -> bool:
    """Return whether an event is the end of a job that was cancelled after its ranks had saved and stopped."""
    return event["event"] == history.FAILURE and event.get("how") == CANCELLED and event.get("exit_status") == 0


def newest_log(run_dir: Path, starts: Sequence[Start], begun: StartRecord | None) -> str | None:
    """Return the log of the newest start; `begun` may be one that did not reach training."""
    last = starts[-1] if starts else None
    if begun is None or (last is not None and (last.attempt == begun.name or last.time_unix_s > begun.time_unix_s)):
        return last.log if last is not None else None
    return begun.log or _output(run_dir, begun.name)


def describe_failure(record: FailureRecord) -> str:
    """Describe a failure by rank, host and error."""
    return f"rank {record.rank} on {record.host}: {record.error}: {record.message}"


def _output(run_dir: Path, attempt: str) -> str | None:
    path = run_dir / ATTEMPTS_DIR / attempt / "output.log"
    return str(path) if path.is_file() else None


def seconds(event: dict[str, Any]) -> float:
    """Return the time of an event."""
    value = event.get("time_unix_s")
    return float(value) if isinstance(value, (int, float)) else 0.0


def one_line(text: str) -> str:
    """Shorten an error's message to one line."""
    return shortened(text, SHOWN_CHARACTERS)
