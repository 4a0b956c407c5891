"""What the trainer tells the outside: values with units in their names, and the hooks that take them.

In: figures of steps and evaluations. Out: nothing; a hook never changes the training. Rank 0 only, except where a hook
says otherwise.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.recipe.schema import RunConfig

logger = logging.getLogger("ctxlm_ds")

Phase = Literal["training", "evaluation", "saving"]


@dataclass(frozen=True)
class RunStart:
    """Where a run begins or goes on."""

    step: int
    """Optimizer steps done before; 0 for a fresh run."""
    last_step: int
    """Step at which the run is complete."""
    config: RunConfig
    """The resolved recipe."""


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
    """Each term's share of right predictions."""
    learning_rate: float
    grad_norm: float | None
    """Global L2 norm before clipping."""
    tokens: int
    """Non-padding positions since the run's beginning."""
    step_tokens: int
    """Those of this step."""
    step_seconds: float
    total_seconds: float
    """Time in training steps since the run's beginning, over all restarts."""
    epoch: int
    skipped_steps: int = 0
    """Steps since the run's beginning without an update (fp16 overflow, anomalies)."""
    rollbacks: int = 0
    """Times that the run went back to a checkpoint from a bad batch."""
    loss_scale: float | None = None
    """fp16 only."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    reason: str
    """The limit that was reached, or the signal."""
    step: int
    tokens: int
    total_seconds: float
    """Time in training steps over all restarts."""
    elapsed_seconds: float
    """Wall time of this start."""
    completed: bool = True
    """False where the same command would go on (a signal, the wall-time limit)."""
    failed: bool = False
    """True where an error ended the run; what to do stands in its message."""


class Hook:
    """Follows a run; each method does nothing unless it is overridden."""

    def on_run_start(self, start: RunStart) -> None:
        """Before the first step, after a checkpoint was loaded."""

    def on_phase(self, phase: Phase) -> None:
        """What the run does from now on."""

    def on_step_end(self, metrics: StepMetrics) -> None:
        """After every optimizer step."""

    def on_rollback(self, step: int) -> None:
        """The run went back to a checkpoint of this step; what was recorded after it is void."""

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """After one held-out source was evaluated; names are eval/SOURCE/FIGURE."""

    def on_run_end(self, end: RunEnd) -> None:
        """After the last checkpoint."""


class GuardedHook(Hook):
    """A hook whose disk may fill up or go away: training goes on, and one warning says what is missing."""

    def __init__(self, hook: Hook) -> None:
        self._hook: Hook | None = hook

    def on_run_start(self, start: RunStart) -> None:
        self._call("on_run_start", start)

    def on_phase(self, phase: Phase) -> None:
        self._call("on_phase", phase)

    def on_step_end(self, metrics: StepMetrics) -> None:
        self._call("on_step_end", metrics)

    def on_rollback(self, step: int) -> None:
        self._call("on_rollback", step)

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        self._call("on_evaluation", step, figures)

    def on_run_end(self, end: RunEnd) -> None:
        self._call("on_run_end", end)

    def _call(self, event: str, *values: object) -> None:
        if self._hook is None:
            return
        try:
            getattr(self._hook, event)(*values)
        except OSError as error:
            name = type(self._hook).__name__
            self._hook = None
            logger.warning("%s stops writing for the rest of this run, training goes on: %s", name, error)


@dataclass
class Throughput:
    """Tokens and time of the steps since the last report."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0

    def add(self, metrics: StepMetrics) -> None:
        """Count one more step."""
        self.tokens += metrics.step_tokens
        self.seconds += metrics.step_seconds
        self.steps += 1

    def take(self) -> tuple[float, float]:
        """Tokens a second and seconds a step since the last call; starts anew."""
        tokens_per_second = self.tokens / max(self.seconds, 1e-9)
        step_seconds = self.seconds / max(self.steps, 1)
        self.tokens, self.seconds, self.steps = 0, 0.0, 0
        return tokens_per_second, step_seconds


def is_reported(step: int, interval_steps: int) -> bool:
    """Whether a step gets a line: the first and every interval_steps-th, wherever a run was interrupted."""
    return step == 1 or step % interval_steps == 0


def memory_bytes() -> int:
    """Peak memory of this process's accelerator; without one, the memory the process has in RAM now."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def build_hooks(config: RunConfig, run_dir: Path, topology: Topology) -> list[Hook]:
    """Metrics, TensorBoard, status and summary on rank 0; the profiler on every rank, where it is asked for."""
    # The hooks themselves build on what stands above.
    from ctxlm_ds.training.metrics import METRICS_NAME, TENSORBOARD_DIR, MetricsWriter, TensorBoardWriter
    from ctxlm_ds.training.profiler import PROFILE_DIR, ProfilerHook
    from ctxlm_ds.training.status import StatusHook, SummaryHook

    hooks: list[Hook] = []
    if topology.is_main:
        interval_steps = config.logging.interval_steps
        hooks.append(GuardedHook(MetricsWriter(run_dir / METRICS_NAME, interval_steps)))
        if config.logging.tensorboard and _has_tensorboard():
            hooks.append(GuardedHook(TensorBoardWriter(run_dir / TENSORBOARD_DIR, interval_steps)))
        hooks += [StatusHook(interval_steps), SummaryHook(run_dir)]
    if config.profiler.num_steps > 0:
        hooks.append(GuardedHook(ProfilerHook(config.profiler, run_dir / PROFILE_DIR, topology.rank)))
    return hooks


def _has_tensorboard() -> bool:
    if importlib.util.find_spec("tensorboard") is not None:
        return True
    logger.warning("logging.tensorboard: tensorboard is not installed, no points are written (pip install tensorboard)")
    return False
