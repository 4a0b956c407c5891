"""Starts and ends of a run as events of RUN/history.jsonl, written by rank 0 while it holds the run's lock."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from ctxlm_ds.process.launch import RankInfo
from ctxlm_ds.process.run_history import ATTEMPT_VARIABLE, DEFAULT_ATTEMPT, END, START, append_event
from ctxlm_ds.training.hooks import Hook, RunEnd, RunStart

LOG_VARIABLE = "CTXLM_LOG_FILE"
"""The job's log, where the starter knows it better than this process, whose stderr is a pipe to the launcher."""


class HistoryHook(Hook):
    """Appends START before the first step and END after the last checkpoint, or when an error ends the run.

    Args:
        run_dir: the run directory.
        ranks: of this process.
    """

    def __init__(self, run_dir: Path, ranks: RankInfo) -> None:
        self._run_dir = run_dir
        self._ranks = ranks

    def on_run_start(self, start: RunStart) -> None:
        append_event(
            self._run_dir,
            START,
            step=start.step,
            last_step=start.last_step,
            world_size=self._ranks.world_size,
            **start_facts(self._ranks),
        )

    def on_run_end(self, end: RunEnd) -> None:
        # Told while the exception is on its way.
        error = sys.exc_info()[1] if end.failed else None
        reason = end.reason if error is None else f"{type(error).__name__}: {error}"
        append_event(
            self._run_dir,
            END,
            step=end.step,
            reason=reason,
            completed=end.completed and not end.failed,
            failed=end.failed,
            attempt=attempt_name(),
        )


def start_facts(ranks: RankInfo) -> dict[str, Any]:
    """Where and by whom this start was made; None for what is not known."""
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    return {
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "restart_count": int(restarts) if restarts.isdigit() else 0,
        "attempt": attempt_name(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "launcher": ranks.launcher,
        "log": os.environ.get(LOG_VARIABLE) or own_log(),
    }


def attempt_name() -> str:
    """The folder below RUN/attempts that this start writes to."""
    return os.environ.get(ATTEMPT_VARIABLE) or DEFAULT_ATTEMPT


def own_log() -> str | None:
    """The file that this process's stderr goes to; None for a terminal or a pipe."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return None
    return path if os.path.isfile(path) else None
