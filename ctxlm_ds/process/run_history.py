"""The events of a run: RUN/history.jsonl, one per line.

Rank 0 writes them while it holds the run's lock, and so does the job that starts and restarts it.
`python -m ctxlm_ds.process.run_history RUN_DIR` ends with status 0 if the run has been trained to its end, else with 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from ctxlm_ds.process.run_files import MAX_LINE_BYTES, parse_line, read_value
from ctxlm_ds.untrusted_json import open_regular

HISTORY_NAME = "history.jsonl"
MAX_UNIX_S = 1e11  # the year 5138
ATTEMPTS_DIR = "attempts"  # a folder for the evidence of each start
ATTEMPT_VARIABLE = "CTXLM_ATTEMPT"
"""Name of this start's folder below RUN/attempts, the same on every rank; the Slurm job sets it."""
JOB_ATTEMPT = "job-"
"""The names of a Slurm job's starts begin so; it starts its ranks itself (apps/cluster/job.py)."""

START = "start"  # rank 0 begins or resumes: step, world_size, job_id
END = "end"  # rank 0 ended in order: step, reason, completed, failed
SKIP = "skip"  # a batch was skipped: step, why, loss, grad_norm, rows
ROLLBACK = "rollback"  # back from a bad batch: step, to_step, why, loss, grad_norm, rows, passed_over
ANOMALY = "anomaly"  # the run stopped at a bad batch: step, why, loss, grad_norm, rows
SAVE_FAILED = "save_failed"  # a checkpoint could not be written: step, why
FAILURE = "failure"  # the job saw its ranks end badly: why, exit_status, first_rank (-1: a node), attempt
REQUEUE = "requeue"  # the job put itself back into the queue: why, how
GIVE_UP = "give_up"  # the job stopped restarting: why


def append_event(run_dir: Path, event: str, **values: Any) -> bool:
    """Append one complete line; return False if the disk is full or missing, which does not end the run."""
    line = json.dumps({"time_unix_s": round(time.time(), 6), "event": event, **values}) + "\n"
    with contextlib.suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        with open(run_dir / HISTORY_NAME, "ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            file.write(("\n" * torn + line).encode())
        return True
    return False


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """Read the events, oldest first; torn lines, and lines that are no events, are passed over."""
    with contextlib.suppress(OSError), open_regular(run_dir / HISTORY_NAME) as file:
        events = [parse_line(line, "event", str) for line in iter(partial(file.readline, MAX_LINE_BYTES), b"")]
        return [event for event in events if event and read_value(event, "time_unix_s", float, MAX_UNIX_S) is not None]
    return []


def is_completed(run_dir: Path) -> bool:
    """Return whether the run's last start ended with the last step done."""
    ends = [event for event in read_history(run_dir) if event["event"] in (START, END)]
    return bool(ends) and ends[-1]["event"] == END and bool(ends[-1].get("completed"))


def attempt_folder(run_dir: Path) -> Path:
    """Return the folder of this start's evidence (failures, stacks), which is not made here."""
    return run_dir / ATTEMPTS_DIR / (os.environ.get(ATTEMPT_VARIABLE) or "by-hand")


def own_job_id() -> str | None:
    """Return this process's Slurm job for scancel: a task as ARRAY_TASK, because its number may be the array's."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def in_job() -> bool:
    """Return whether this rank was started by a Slurm job of ours, which may start it again."""
    return os.environ.get(ATTEMPT_VARIABLE, "").startswith(JOB_ATTEMPT)


if __name__ == "__main__":
    sys.exit(0 if is_completed(Path(sys.argv[1])) else 1)
