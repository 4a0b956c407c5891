"""A window of steps under torch's profiler: a trace for Perfetto and a table of the most expensive operators."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ctxlm_ds.process.library_noise import without_profiler_marks
from ctxlm_ds.recipe.schema import ProfilerConfig
from ctxlm_ds.training.hooks.hooks import Hook, RunEnd, RunStart, StepMetrics

logger = logging.getLogger("ctxlm_ds")

PROFILE_DIR = "profile"
TABLE_ROWS = 40


class ProfilerHook(Hook):
    """Records steps start_step to start_step + num_steps - 1 on every rank, as far as this start runs them."""

    may_fail = True

    def __init__(self, config: ProfilerConfig, directory: str | Path, rank: int) -> None:
        self._first = max(1, config.start_step)
        self._last = self._first + config.num_steps - 1
        self._directory = Path(directory)
        self._rank = rank
        self._profile: Any = None
        self._began = 0
        self._done = 0

    def on_run_start(self, start: RunStart) -> None:
        self._done = start.step
        self._begin_if_due()

    def on_step_end(self, metrics: StepMetrics) -> None:
        self._done = metrics.step
        if self._profile is not None and self._done >= self._last:
            self._finish()
        self._begin_if_due()

    def on_run_end(self, end: RunEnd) -> None:
        if self._profile is not None:
            self._finish()

    def _begin_if_due(self) -> None:
        if self._profile is not None or not self._first <= self._done + 1 <= self._last:
            return
        from torch.profiler import profile

        self._began = self._done + 1
        self._profile = profile(record_shapes=True)
        with without_profiler_marks():
            self._profile.start()

    def _finish(self) -> None:
        import torch

        recorded, self._profile = self._profile, None
        with without_profiler_marks():
            recorded.stop()
        if self._done < self._began:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        stem = self._directory / f"steps-{self._began:08d}-{self._done:08d}-rank-{self._rank:05d}"
        trace = stem.with_suffix(".trace.json.gz")
        recorded.export_chrome_trace(str(trace))
        order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=order, row_limit=TABLE_ROWS)
        stem.with_suffix(".txt").write_text(table, encoding="utf-8")
        logger.info("profile of steps %d to %d: %s", self._began, self._done, trace)
