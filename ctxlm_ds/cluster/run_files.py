"""What lies in a run directory, read for its status: the lock, the last figures, the checkpoints, the ranks' records.

In: paths. Out: plain values, None for what is missing, a Damaged for what cannot be made sense of; nothing here raises
for the state of a file. Needs neither torch nor numpy, and writes nothing. The starts of a run and how each ended
(Start) are put together from its history and what failing ranks left.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, list_checkpoints
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME, verify
from ctxlm_ds.cluster.start_records import CANCELLED, END_FILE, START_FILE, Attempt, read_attempt
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.process.lock_record import LockRecord, process_start_ticks, this_process
from ctxlm_ds.process.run_history import (
    ATTEMPTS_DIR,
    DEFAULT_ATTEMPT,
    END,
    FAILURE,
    GIVE_UP,
    HISTORY_NAME,
    REQUEUE,
    START,
    FailureRecord,
    read_failures,
    shortened,
)
from ctxlm_ds.process.run_lock import LOCK_NAME

METRICS_NAME = "metrics.jsonl"
CONFIG_NAME = "config.yaml"
STACKS_NAME = "stacks.txt"
TAIL_BYTES = 1 << 16
MOST_TAIL_BYTES = 1 << 22
LATEST_UNIX_S = 1e18
RUN_FILES = (HISTORY_NAME, METRICS_NAME, LOCK_NAME, ATTEMPTS_DIR, CHECKPOINTS_DIR)


@dataclass(frozen=True)
class Damaged:
    """A file that is there and cannot be read; `why` in a few words."""

    why: str


@dataclass(frozen=True)
class Lock:
    """The run directory's lock as one look found it."""

    record: LockRecord
    heartbeat_unix_s: float
    holder_gone: bool
    """Seen on the holder's own machine: its process has ended."""


@dataclass(frozen=True)
class Checkpoint:
    """The newest checkpoint."""

    step: int
    saved_unix_s: float
    problem: str | None
    """None where its manifest is there and every file has the size that it says."""


def is_run(folder: Path) -> bool:
    """Whether a folder holds anything of a run."""
    return any((folder / name).exists() for name in RUN_FILES)


def read_lock(run_dir: Path) -> Lock | Damaged | None:
    """Who holds the run."""
    try:
        # Opened, so that a network file system asks its server for the time of the last heartbeat.
        with open(run_dir / LOCK_NAME, "rb") as handle:
            heartbeat_unix_s = os.fstat(handle.fileno()).st_mtime
            text = handle.read()
        record = LockRecord(**json.loads(text))
        numbers = isinstance(record.pid, int) and isinstance(record.acquired_unix_s, (int, float))
        if not numbers or not isinstance(record.job_id, (str, type(None))):
            return Damaged("damaged")
        gone = record.same_machine(this_process()) and process_start_ticks(record.pid) != record.process_start_ticks
    except FileNotFoundError:
        return None
    except OSError as error:
        return Damaged(error.strerror or "unreadable")
    except (ValueError, TypeError):
        return Damaged("damaged")
    return Lock(record, heartbeat_unix_s, gone)


def read_last_lines(run_dir: Path, count: int) -> list[dict[str, Any]] | Damaged:
    """The last training lines of metrics.jsonl, oldest first, read from the file's end: it may be of many gigabytes."""
    try:
        found = []
        for line in _lines_backwards(run_dir / METRICS_NAME):
            values = _training_line(line)
            if values is not None:
                found.append(values)
            if len(found) == count:
                break
    except FileNotFoundError:
        return []
    except OSError as error:
        return Damaged(error.strerror or "unreadable")
    try:
        empty = (run_dir / METRICS_NAME).stat().st_size == 0
    except OSError:
        empty = True
    return found[::-1] if found or empty else Damaged("damaged")


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """Lines from the last to the first, within a bound; a first piece that is no whole line is left out."""
    with open(path, "rb") as handle:
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
    """A line of a training step; None for held-out figures, and for what was torn or damaged."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(values, dict) and isinstance(values.get("step"), int) and "loss" in values
    return values if whole else None


def metrics_time(run_dir: Path) -> float | None:
    """When the last line was written."""
    try:
        return (run_dir / METRICS_NAME).stat().st_mtime
    except OSError:
        return None


def read_settings(run_dir: Path) -> dict[str, Any] | Damaged:
    """The resolved recipe's `training` section; empty where there is none yet."""
    try:
        import yaml

        # The C parser, where PyYAML has it, is ten times as fast.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        document = yaml.load((run_dir / CONFIG_NAME).read_text(encoding="utf-8"), loader)
    except FileNotFoundError:
        return {}
    except OSError as error:
        return Damaged(error.strerror or "unreadable")
    except ImportError:
        return {}
    except (ValueError, yaml.YAMLError):
        return Damaged("damaged")
    training = document.get("training") if isinstance(document, dict) else None
    return training if isinstance(training, dict) else Damaged("damaged")


def read_checkpoint(run_dir: Path) -> Checkpoint | Damaged | None:
    """The newest checkpoint; its files are compared by size, which takes no time, not by content."""
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
    return Checkpoint(step, _time_of(folders[step] / MANIFEST_NAME, folders[step]), problem)


def _time_of(*paths: Path) -> float:
    for path in paths:
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0


def attempt_failures(run_dir: Path, attempt: str) -> list[FailureRecord]:
    """The records of one start, the likely cause first."""
    return read_failures(run_dir / ATTEMPTS_DIR / attempt)


def newest_attempt(run_dir: Path) -> str | None:
    """The start whose folder changed last."""
    try:
        folders = [path for path in (run_dir / ATTEMPTS_DIR).iterdir() if path.is_dir()]
    except OSError:
        return None
    return max(folders, key=lambda path: _time_of(path)).name if folders else None


def newest_begun(run_dir: Path) -> Attempt | None:
    """What a job noted when it began the newest start; None where that was made by hand, or the note is damaged."""
    name = newest_attempt(run_dir)
    found = read_attempt(run_dir / ATTEMPTS_DIR / name / START_FILE) if name is not None else None
    if found is None or found.name != name or not isinstance(found.time_unix_s, (int, float)):
        return None
    texts = isinstance(found.job_id, str) and isinstance(found.log, (str, type(None)))
    return found if texts and 0 <= found.time_unix_s < LATEST_UNIX_S else None


def read_job_id(path: Path) -> str | None:
    """The id of the job that a record (the lock, a successor's, a start's) names."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["job_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def has_open_attempt(run_dir: Path, job_id: str) -> bool:
    """Whether a job has begun a start and not noted its end."""
    try:
        folders = list((run_dir / ATTEMPTS_DIR).glob(f"job-{job_id}-*"))
        return any((path / START_FILE).exists() and not (path / END_FILE).exists() for path in folders)
    except OSError:
        return False


SHOWN_CHARACTERS = 200
NO_WORD = "ended without a word (killed, or its node was lost)"


@dataclass(frozen=True)
class Start:
    """One start of a run's ranks that came as far as training."""

    time_unix_s: float
    step: int
    last_step: int | None
    attempt: str
    log: str | None
    ended: str
    """How it ended, in words; of the last start, how it would have if it has."""


def list_starts(run_dir: Path, events: Sequence[dict[str, Any]]) -> list[Start]:
    """Every start, oldest first."""
    begins = [index for index, event in enumerate(events) if event["event"] == START]
    return [
        _start(run_dir, events[begin:end], seconds(events[end]) if end < len(events) else math.inf)
        for begin, end in zip(begins, [*begins[1:], len(events)])  # noqa: B905 (Python 3.9 runs this on login nodes)
    ]


def _start(run_dir: Path, events: Sequence[dict[str, Any]], next_s: float) -> Start:
    """A start from its event and those up to the next one's, which came at `next_s`."""
    first = events[0]
    attempt = str(first.get("attempt") or DEFAULT_ATTEMPT)
    records = attempt_failures(run_dir, attempt)
    # Starts by hand share a folder.
    own = [record for record in records if seconds(first) <= record.time_unix_s < next_s]
    return Start(
        time_unix_s=seconds(first),
        step=first["step"] if isinstance(first.get("step"), int) else 0,
        last_step=first["last_step"] if isinstance(first.get("last_step"), int) else None,
        attempt=attempt,
        log=str(first["log"]) if first.get("log") else _output(run_dir, attempt),
        ended=_end_in_words(run_dir / ATTEMPTS_DIR / attempt, own, events[1:]),
    )


def _end_in_words(folder: Path, records: Sequence[FailureRecord], after: Sequence[dict[str, Any]]) -> str:
    """What the job says of the end, else the ranks' records, else rank 0 at its end."""
    told = [event for event in after if event["event"] in (FAILURE, REQUEUE) and event.get("attempt") == folder.name]
    gave_up = any(event["event"] == GIVE_UP for event in after)
    requeued = any(event["event"] == REQUEUE for event in told)
    cancelled = any(is_cancelled_in_order(event) for event in told)
    tail = "; the job gave up" if gave_up else "; requeued" if requeued else "; cancelled" if cancelled else ""
    end = next((event for event in after if event["event"] == END), None)
    if told:
        return one_line(str(told[0].get("why") or "failed")) + tail
    if end is not None and not end.get("failed"):
        return one_line(str(end.get("reason"))) + tail
    if records:
        where = f" ({folder / STACKS_NAME})" if records[0].error == "Hang" else ""
        return one_line(describe_failure(records[0])) + where + tail
    return (one_line(str(end.get("reason"))) if end is not None else NO_WORD) + tail


def is_cancelled_in_order(event: dict[str, Any]) -> bool:
    """Whether a job tells that a person ended it, and its ranks had saved and stopped by themselves."""
    return event["event"] == FAILURE and event.get("how") == CANCELLED and event.get("exit_status") == 0


def newest_log(run_dir: Path, starts: Sequence[Start], begun: Attempt | None) -> str | None:
    """Where the newest start writes, `begun` being one that may not have come as far as training."""
    last = starts[-1] if starts else None
    if begun is None or (last is not None and (last.attempt == begun.name or last.time_unix_s > begun.time_unix_s)):
        return last.log if last is not None else None
    return begun.log or _output(run_dir, begun.name)


def describe_failure(record: FailureRecord) -> str:
    """Rank, host and error."""
    return f"rank {record.rank} on {record.host}: {record.error}: {record.message}"


def _output(run_dir: Path, attempt: str) -> str | None:
    path = run_dir / ATTEMPTS_DIR / attempt / "output.log"
    return str(path) if path.is_file() else None


def seconds(event: dict[str, Any]) -> float:
    """When an event was."""
    value = event.get("time_unix_s")
    return float(value) if isinstance(value, (int, float)) else 0.0


def one_line(text: str) -> str:
    """Whatever an error said, short."""
    return shortened(text, SHOWN_CHARACTERS)
