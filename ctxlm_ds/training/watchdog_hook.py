"""What the watchdog hears of training: each event of a run is a sign that it gets on.

In: the trainer's events. Out: beats of a Watchdog. Not here: limits, evidence (process/watchdog.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from ctxlm_ds.process.watchdog import Watchdog
from ctxlm_ds.training.hooks import Hook, Phase, RunEnd, RunStart, StepMetrics


class WatchdogHook(Hook):
    """Tells this rank's watchdog what the trainer does."""

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
