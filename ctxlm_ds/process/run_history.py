"""The events of a run: RUN/history.jsonl, one per line, and RUN/attempts, a folder for each start's evidence.

Written by rank 0 while it holds the run's lock, and by the job that starts and restarts it; read by the job (is there
progress?), by ctxlm status and by people. Needs no torch. A torn last line (a killed writer) is passed over.
attempts/ATTEMPT/rank-00003.json says how one rank ended. `python -m ctxlm_ds.process.run_history RUN_DIR` ends with
status 0 if the run has been trained to its end, else with 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import read_object, write_text
from ctxlm_ds.untrusted_json import open_regular

HISTORY_NAME = "history.jsonl"
MOST_BYTES = 1 << 28
ATTEMPTS_DIR = "attempts"
ATTEMPT_VARIABLE = "CTXLM_ATTEMPT"
"""Name of this start's folder below RUN/attempts, the same on every rank; the Slurm job sets it."""
DEFAULT_ATTEMPT = "by-hand"
JOB_ATTEMPT = "job-"
"""The names of a Slurm job's starts begin so; it starts its ranks itself (apps/cluster/job.py)."""

START = "start"  # rank 0 begins or resumes: step, world_size, job_id
END = "end"  # rank 0 ended in order: step, reason, completed, failed
SKIP = "skip"  # a batch was skipped: step, why, loss, grad_norm, rows
ROLLBACK = "rollback"
"""The run went back from a bad batch: step, to_step, why, loss, grad_norm, rows, passed_over."""
ANOMALY = "anomaly"  # the run stopped at a bad batch: step, why, loss, grad_norm, rows
SAVE_FAILED = "save_failed"  # a checkpoint could not be written: step, why
FAILURE = "failure"  # the job saw its ranks end badly: why, exit_status, first_rank, attempt
REQUEUE = "requeue"  # the job put itself back into the queue: why, how
GIVE_UP = "give_up"  # the job stopped restarting: why


def append_event(run_dir: Path, event: str, **values: Any) -> bool:
    """Append one complete line; return False if the disk is full or missing, which does not end the run."""
    line = json.dumps({"time_unix_s": round(time.time(), 6), "event": event, **values}) + "\n"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(run_dir / HISTORY_NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, ("\n" * torn + line).encode())
        finally:
            os.close(handle)
    except OSError:
        return False
    return True


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """Read the events, oldest first; lines that are no events are passed over."""
    try:
        with open_regular(run_dir / HISTORY_NAME) as handle:
            text = handle.read(MOST_BYTES).decode(errors="replace")
    except OSError:
        return []
    return [event for event in map(_parse, text.splitlines()) if event is not None]


def is_completed(run_dir: Path) -> bool:
    """Return whether the run's last start ended with the last step done."""
    ends = [event for event in read_history(run_dir) if event["event"] in (START, END)]
    return bool(ends) and ends[-1]["event"] == END and bool(ends[-1].get("completed"))


def attempt_folder(run_dir: Path) -> Path:
    """Return the folder of this start's evidence (failures, stacks), which is not made here."""
    return run_dir / ATTEMPTS_DIR / (os.environ.get(ATTEMPT_VARIABLE) or DEFAULT_ATTEMPT)


def in_job() -> bool:
    """Return whether this rank was started by a Slurm job of ours, which may start it again."""
    return os.environ.get(ATTEMPT_VARIABLE, "").startswith(JOB_ATTEMPT)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_event = isinstance(event, dict) and isinstance(event.get("event"), str) and "time_unix_s" in event
    return event if is_event else None


RECORD_GLOB = "rank-*.json"
SHOWN_CHARACTERS = 300

_SOURCE_PLACE = re.compile(r"\[\S+:\d+\] ")


@dataclass(frozen=True)
class FailureRecord:
    """The end of one rank."""

    time_unix_s: float
    rank: int
    host: str
    exit_status: int
    error: str  # the exception's type
    message: str
    traceback: str | None = None  # None for a user's mistake
    consequence: bool = False  # True if another rank's end is the reason for this one


def shortened(text: str) -> str:
    """Shorten an error's message to one line, without the C++ source line that torch's begin with."""
    line = _SOURCE_PLACE.sub("", " ".join(text.split()))
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"


def record_name(rank: int) -> str:
    """Return `rank-00003.json` for 3."""
    return f"rank-{rank:05d}.json"


def read_failures(folder: Path) -> list[FailureRecord]:
    """Read the records of one attempt, the likely reason first: causes before consequences, each by time.

    Damaged records are passed over.
    """
    records = [record for path in sorted(folder.glob(RECORD_GLOB)) if (record := read_record(path)) is not None]
    return sorted(records, key=lambda record: (record.consequence, record.time_unix_s))


def read_record(path: Path) -> FailureRecord | None:
    """Read one record; None if it is missing or damaged."""
    try:
        values = read_object(path) or {}
        known = {field.name for field in fields(FailureRecord)}
        record = FailureRecord(**{name: value for name, value in values.items() if name in known})
        return record if float(record.time_unix_s) >= 0 else None
    except (ValueError, TypeError):
        return None


def write_record(folder: Path, record: FailureRecord) -> None:
    """Write a record, unless the disk is full or missing."""
    with contextlib.suppress(OSError):
        write_text(folder / record_name(record.rank), json.dumps(asdict(record), indent=1) + "\n")


def clear_evidence(folder: Path, before_unix_s: float) -> None:
    """Remove the evidence of earlier starts from a folder, which only starts by hand share."""
    for path in [*folder.glob(RECORD_GLOB), *folder.glob("*stacks*.txt")]:
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < before_unix_s:
                path.unlink()


def main() -> None:
    """Entry point for scripts with several phases."""
    sys.exit(0 if is_completed(Path(sys.argv[1])) else 1)


if __name__ == "__main__":
    main()
