"""Run directories as the trainer and its job leave them, for the tests of their status."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.cluster.run_status import details, table
from ctxlm_ds.apps.cluster.status import RunStatus, read_statuses
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, step_name
from ctxlm_ds.checkpoint.manifest import hash_files, write_manifest
from ctxlm_ds.process.lock_record import this_process
from ctxlm_ds.process.run_history import START, append_event
from ctxlm_ds.process.run_lock import LOCK_NAME

ATTEMPT = "job-7-0-0"


def make_run(run_dir: Path, step: int = 20, max_steps: int = 100) -> Path:
    """A run as the trainer leaves it in the middle: settings, figures, two checkpoints."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(f"name: tiny\ntraining:\n  max_steps: {max_steps}\n")
    lines = [json.dumps(line(number)) for number in range(1, step + 1)]
    lines.insert(10, json.dumps({"step": 10, "eval/heldout/loss": 5.0}))
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for saved in (step - 10, step):
        folder = run_dir / CHECKPOINTS_DIR / step_name(saved)
        folder.mkdir(parents=True)
        (folder / "weights-00000.safetensors").write_bytes(b"x" * 100)
        write_manifest(folder, saved, hash_files(folder, ["weights-00000.safetensors"]))
    return run_dir


def line(step: int) -> dict[str, Any]:
    return {
        "step": step, "loss": 7 - step / 100, "tokens": 500 * step, "tokens_per_second": 999.0, "step_seconds": 0.5,
        "total_seconds": 0.25 * step,
    }  # fmt: skip


def started(run_dir: Path, step: int = 0, attempt: str = ATTEMPT) -> None:
    append_event(
        run_dir, START, step=step, last_step=100, world_size=2, job_id="7", attempt=attempt, log="/logs/7.log"
    )  # fmt: skip


def status(run_dir: Path, **queue: str) -> RunStatus:
    (found,) = read_statuses([run_dir], {name.removeprefix("job_"): state for name, state in queue.items()})
    # Whatever it is, it can be shown.
    assert table([found]) and details(found) and json.dumps(vars(found))
    return found


def leave_lock(run_dir: Path, age_s: float, **changes: Any) -> None:
    """A lock that nobody holds any more."""
    record = {**vars(this_process()), "host": "elsewhere", "job_id": "7", "acquired_unix_s": 5.0, **changes}
    (run_dir / LOCK_NAME).write_text(json.dumps(record))
    os.utime(run_dir / LOCK_NAME, (time.time() - age_s,) * 2)
