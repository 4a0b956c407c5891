"""Hooks that record a run for others: events of RUN/history.jsonl, RUN/status.json, and beats of the watchdog."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.process.failure import Watchdog
from ctxlm_ds.process.launch import RankInfo
from ctxlm_ds.process.run_files import read_status, update_status
from ctxlm_ds.process.run_history import END, START, append_event, attempt_folder, own_job_id
from ctxlm_ds.recipe.words import STEPS_FOLLOW
from ctxlm_ds.training.hooks.hooks import Hook, IntervalHook, Phase, RunEnd, RunStart, StepMetrics

if TYPE_CHECKING:
    from ctxlm_ds.recipe.schema import TrainingConfig
    from ctxlm_ds.training.engine.engine import Engine

LOG_VARIABLE = "CTXLM_LOG_FILE"
"""Names the job's log if the starter knows it; stderr of this process may be a pipe to the launcher."""


def environment(engine: Engine, training: TrainingConfig) -> dict[str, Any]:
    """Return what must be the same for a bitwise resume."""
    import torch

    topology = engine.topology
    return {
        "world_size": topology.world_size,
        "tensor_parallel_size": topology.tensor_parallel_size,
        "pipeline_parallel_size": topology.pipeline_parallel_size,
        "context_parallel_size": topology.context_parallel_size,
        "sequence_parallel": engine.parallel.splits_tokens,
        "zero_stage": engine.zero_stage,
        "micro_batch_size": training.micro_batch_size,
        "precision": training.precision,
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "device": str(engine.device.type),
        "optimizer": engine.optimizer_choice,
    }


class RecordHook(IntervalHook):
    """Records a run for others, on rank 0 while it holds the run's lock.

    RUN/history.jsonl gets START before the first step, and END after the last checkpoint or when an error ends the
    run; RUN/status.json is written then too, and at each report.
    """

    def __init__(
        self, run_dir: Path, ranks: RankInfo, environment: Mapping[str, Any], last_good: Callable[[], str | None]
    ) -> None:
        """Prepare; `environment` describes layout, device and versions, `last_good` returns the newest checkpoint."""
        super().__init__(interval_steps=1)
        self._run_dir, self._ranks = run_dir, ranks
        self._environment = environment
        self._last_good = last_good
        self._last_step: int | None = None

    def on_run_start(self, start: RunStart) -> None:
        self._last_step = start.last_step if start.last_step < STEPS_FOLLOW else None
        self._interval_steps = start.config.logging.interval_steps
        restarts = os.environ.get("SLURM_RESTART_COUNT", "")
        place = {"job_id": own_job_id(), "attempt": attempt_folder(self._run_dir).name, "log": _log_file()}
        known = {"environment": self._environment, "changed_settings": list(start.changed_settings)}
        append_event(
            self._run_dir, START, step=start.step, last_step=start.last_step, world_size=self._ranks.world_size,
            restart_count=int(restarts) if restarts.isdigit() else 0, host=socket.gethostname(), pid=os.getpid(),
            launcher=self._ranks.launcher, **place, **{name: value for name, value in known.items() if value},
        )  # fmt: skip
        starts = read_status(self._run_dir).get("starts")
        update_status(
            self._run_dir, state="running", why=None, step=start.step, of=self._last_step, left_s=None,
            starts=starts + (not start.begins_phase) if isinstance(starts, int) else 1,
            checkpoint=self._last_good(), **place,
        )  # fmt: skip

    def report(self, metrics: StepMetrics, tokens_per_second: float, step_seconds: float) -> None:
        update_status(
            self._run_dir, step=metrics.step, loss=metrics.loss, tokens_per_second=tokens_per_second,
            left_s=self._last_step and (self._last_step - metrics.step) * step_seconds, skipped=metrics.skipped_steps,
            rollbacks=metrics.rollbacks, checkpoint=self._last_good(),
        )  # fmt: skip

    def on_run_end(self, end: RunEnd) -> None:
        self.report_last_step()
        error = sys.exc_info()[1] if end.failed else None  # which is being handled
        why = end.reason if error is None else f"{type(error).__name__}: {error}"
        append_event(
            self._run_dir, END, step=end.step, reason=why, completed=end.completed and not end.failed,
            failed=end.failed, attempt=attempt_folder(self._run_dir).name,
        )  # fmt: skip
        state = "failed" if end.failed else "completed" if end.completed else "stopped"
        state = "running" if end.phase_over else state
        changes = {"last_failure": why} if end.failed else {}
        update_status(
            self._run_dir, state=state, why=why, step=end.step, left_s=None, checkpoint=self._last_good(), **changes
        )


def _log_file() -> str | None:
    """Return the log of this start; None if it is a terminal or a pipe and the starter names no file."""
    stderr = os.path.realpath("/proc/self/fd/2")
    return os.environ.get(LOG_VARIABLE) or (stderr if os.path.isfile(stderr) else None)


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
