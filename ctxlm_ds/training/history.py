"""Hooks that record a run for others: events of RUN/history.jsonl, and beats of the watchdog."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctxlm_ds.process.launch import RankInfo
from ctxlm_ds.process.run_history import ATTEMPT_VARIABLE, DEFAULT_ATTEMPT, END, START, append_event
from ctxlm_ds.process.watchdog import Watchdog
from ctxlm_ds.training.hooks import Hook, Phase, RunEnd, RunStart, StepMetrics

LOG_VARIABLE = "CTXLM_LOG_FILE"
"""Names the job's log if the starter knows it; stderr of this process may be a pipe to the launcher."""


class HistoryHook(Hook):
    """Appends START before the first step and END after the last checkpoint, or when an error ends the run.

    Rank 0 uses it while it holds the run's lock.
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
            **({"changed_settings": list(start.changed_settings)} if start.changed_settings else {}),
        )

    def on_run_end(self, end: RunEnd) -> None:
        # Called while the exception is being handled.
        error = sys.exc_info()[1] if end.failed else None
        append_event(
            self._run_dir,
            END,
            step=end.step,
            reason=end.reason if error is None else f"{type(error).__name__}: {error}",
            completed=end.completed and not end.failed,
            failed=end.failed,
            attempt=attempt_name(),
        )


class WatchdogHook(Hook):
    """Reports each event of a run to this rank's watchdog as progress."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def on_run_start(self, start: RunStart) -> None:
        self._watchdog.beat("start", start.step)

    def on_phase(self, phase: Phase) -> None:
        self._watchdog.enter(phase)

    def on_step_end(self, metrics: StepMetrics) -> None:
        self._watchdog.beat("training", metrics.step)

    def on_rollback(self, step: int) -> None:
        self._watchdog.beat(step=step)

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        self._watchdog.beat()

    def on_run_end(self, end: RunEnd) -> None:
        self._watchdog.beat("end")


def start_facts(ranks: RankInfo) -> dict[str, Any]:
    """Return the job, host, process and log of this start; None for what is unknown."""
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    return {
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "restart_count": int(restarts) if restarts.isdigit() else 0,
        "attempt": attempt_name(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "launcher": ranks.launcher,
        "log": os.environ.get(LOG_VARIABLE) or _stderr_file(),
    }


def attempt_name() -> str:
    """Return the name of this start's folder in RUN/attempts."""
    return os.environ.get(ATTEMPT_VARIABLE) or DEFAULT_ATTEMPT


def _stderr_file() -> str | None:
    """Return the file that stderr goes to, or None for a terminal or a pipe."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return None
    return path if os.path.isfile(path) else None
