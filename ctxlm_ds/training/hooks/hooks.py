"""The interface for following a run: values with units in their names, and hooks that receive them.

A hook never changes the training. Hooks run on rank 0 only, unless one says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from ctxlm_ds.console import logger
from ctxlm_ds.recipe.schema import ProfilerConfig, RunConfig

PROFILE_DIR = "profile"
TABLE_ROWS = 40

Phase = Literal["training", "evaluation", "saving"]


@dataclass(frozen=True)
class RunStart:
    """The start or resume of a run."""

    step: int
    """Optimizer steps done before; 0 for a fresh run."""
    last_step: int
    """Step at which the run is complete."""
    config: RunConfig
    """The resolved recipe."""
    changed_settings: Sequence[str] = ()
    """Settings that differ from the checkpoint's, as `name old -> new`."""
    tokens: int = 0
    """Non-padding positions of the steps done before."""
    begins_phase: bool = False
    """True if the phase before ended in this process."""


@dataclass(frozen=True)
class StepMetrics:
    """Figures of one optimizer step over the global batch."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Weighted sum of the terms."""
    terms: Mapping[str, float]
    """Each loss term's mean over its own predictions (nats)."""
    accuracy: Mapping[str, float]
    """Share of correct predictions of each term."""
    learning_rate: float
    grad_norm: float | None
    """Global L2 norm before clipping."""
    tokens: int
    """Non-padding positions since the beginning of the run."""
    step_tokens: int
    """Non-padding positions of this step."""
    step_seconds: float
    total_seconds: float
    """Time in training steps since the beginning of the run, over all restarts."""
    epoch: int
    skipped_steps: int = 0
    """Steps without an update so far (fp16 overflows, anomalies)."""
    rollbacks: int = 0
    """Times that the run went back to a checkpoint because of a bad batch."""
    loss_scale: float | None = None
    """fp16 only."""
    step_rows: int = 0
    """Rows of this step's global batch; 0 if unknown."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    reason: str
    """The limit that was reached, or the signal."""
    step: int
    tokens: int
    total_seconds: float
    """Time in training steps over all restarts."""
    completed: bool = True
    """False if the same command would resume the run (a signal, the wall-time limit)."""
    failed: bool = False
    """True if an error ended the run."""
    signal_number: int = 0
    """Signal that stopped the run before it was complete; 0 if none did."""
    phase_over: bool = False
    """True if the next phase of the run begins in this process."""


class Hook:
    """Follows a run; each method does nothing unless it is overridden."""

    may_fail = False
    """True if training continues without this hook after one of its `failures`, such as a full disk."""
    failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """Exceptions that end only the hook if it may fail."""

    def on_run_start(self, start: RunStart) -> None:
        """Run before the first step, after a checkpoint was loaded."""

    def on_phase(self, phase: Phase) -> None:
        """Run when evaluation or saving begins, and when training continues."""

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Run after every optimizer step."""

    def on_rollback(self, step: int) -> None:
        """Discard what was recorded after `step`, to whose checkpoint the run went back."""

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """Run after one held-out source was evaluated; names are eval/SOURCE/FIGURE."""

    def on_continuations(self, step: int, texts: Sequence[tuple[str, str]]) -> None:
        """Run after texts were continued; each has the given text and what the model wrote."""

    def on_run_end(self, end: RunEnd) -> None:
        """Run after the last checkpoint."""


class Hooks:
    """The hooks of a run; one that may fail is dropped with a warning when it does."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = list(hooks)

    def append(self, hook: Hook) -> None:
        """Add a hook, which is called after the others."""
        self._hooks.append(hook)

    def prepend(self, hook: Hook) -> None:
        """Add a hook, which is called before the others, so that they receive what it reports at the end."""
        self._hooks.insert(0, hook)

    def call(self, event: str, *values: object) -> None:
        """Call one method of every hook."""
        for hook in list(self._hooks):
            try:
                getattr(hook, event)(*values)
            except Exception as error:
                if not (hook.may_fail and isinstance(error, hook.failures)):
                    raise
                self._hooks.remove(hook)
                name = type(hook).__name__
                logger.warning("%s stops writing for the rest of this run, training continues: %s", name, error)


class IntervalHook(Hook):
    """A hook that reports the first step and every multiple of interval_steps, with the mean speed in between.

    A tracker (registry.py) is such a hook, built with the run directory.
    """

    package: ClassVar[str | None] = None
    """Package that a tracker needs."""
    extra: ClassVar[str | None] = None
    """Extra of ctxlm_ds with the package; None skips the tracker where the package is missing."""
    switch: ClassVar[str | None] = None
    """Setting of the recipe's `logging` that leaves the tracker out if it is false."""

    def __init__(self, interval_steps: int) -> None:
        self._interval_steps = interval_steps
        self.rows_per_second = 0.0
        """Mean of the steps that are being reported; 0 if unknown."""
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._unreported: StepMetrics | None = None
        self._tokens, self._rows, self._seconds, self._steps = 0, 0, 0.0, 0

    def on_step_end(self, metrics: StepMetrics) -> None:
        self._unreported = metrics
        self._tokens += metrics.step_tokens
        self._rows += metrics.step_rows
        self._seconds += metrics.step_seconds
        self._steps += 1
        if self.is_due(metrics.step):
            self.report_last_step()

    def on_rollback(self, step: int) -> None:
        self._forget_steps()

    def is_due(self, step: int) -> bool:
        """Return whether to report a step."""
        return step == 1 or step % self._interval_steps == 0

    def report_last_step(self) -> None:
        """Report the last step if it has not been."""
        metrics = self._unreported
        if metrics is not None:
            seconds = max(self._seconds, 1e-9)
            means = self._tokens / seconds, self._seconds / self._steps
            self.rows_per_second = self._rows / seconds
            self._forget_steps()
            self.report(metrics, *means)

    def report(self, metrics: StepMetrics, tokens_per_second: float, step_seconds: float) -> None:
        """Write a step's metrics, with the mean speed of the steps since the report before."""


def memory_bytes() -> int:
    """Return the peak memory of this process's accelerator, or without one the process's memory now."""
    import psutil
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return int(psutil.Process().memory_info().rss)


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
        self._profile.start()

    def _finish(self) -> None:
        import torch

        recorded, self._profile = self._profile, None
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
