"""Metrics on disk: RUN/metrics.jsonl (one object per line) and RUN/tensorboard, one curve over all restarts.

A resume at step k drops what was written after k.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.atomic import partial_path, publish
from ctxlm_ds.process.line_file import LineFile
from ctxlm_ds.training.hooks import Hook, RunEnd, RunStart, StepMetrics, Throughput, is_reported, memory_bytes

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger("ctxlm_ds")

METRICS_NAME = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"


def step_figures(metrics: StepMetrics, tokens_per_second: float, step_seconds: float) -> dict[str, Any]:
    """Return the metrics of one line or point: loss terms by name, TERM_accuracy, and the rest."""
    figures: dict[str, Any] = {"step": metrics.step, "loss": metrics.loss, **metrics.terms}
    figures |= {f"{term}_accuracy": value for term, value in metrics.accuracy.items()}
    figures["learning_rate"] = metrics.learning_rate
    if metrics.grad_norm is not None:
        figures["grad_norm"] = metrics.grad_norm
    figures |= {
        "epoch": metrics.epoch,
        "tokens": metrics.tokens,
        "tokens_per_second": round(tokens_per_second, 1),
        "step_seconds": round(step_seconds, 6),
        "total_seconds": round(metrics.total_seconds, 3),
        "memory_bytes": memory_bytes(),
    }
    if metrics.loss_scale is not None:
        figures["loss_scale"] = metrics.loss_scale
    if metrics.loss_scale is not None or metrics.skipped_steps:
        figures["skipped_steps"] = metrics.skipped_steps
    if metrics.rollbacks:
        figures["rollbacks"] = metrics.rollbacks
    return figures


class MetricsWriter(Hook):
    """Appends a line to metrics.jsonl every interval_steps, complete and immediately.

    A line has the losses of its step; tokens_per_second and step_seconds are means since the line before.
    """

    may_fail = True

    def __init__(self, path: str | Path, interval_steps: int = 1) -> None:
        self.path = Path(path)
        self._file = LineFile(self.path)
        self._interval_steps = interval_steps
        self._throughput = Throughput()
        self._unwritten: StepMetrics | None = None
        self._evaluated: set[str] = set()
        self._resumed_step = -1

    def on_run_start(self, start: RunStart) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._evaluated = rewind(self.path, start.step)
        self._resumed_step = start.step

    def on_rollback(self, step: int) -> None:
        self._file.forget_after(step)
        self._evaluated = rewind(self.path, step)
        self._resumed_step = step
        self._throughput, self._unwritten = Throughput(), None

    def on_step_end(self, metrics: StepMetrics) -> None:
        self._throughput.add(metrics)
        self._unwritten = metrics
        if is_reported(metrics.step, self._interval_steps):
            self._write_step()

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        if step == self._resumed_step:
            figures = {name: value for name, value in figures.items() if name not in self._evaluated}
        if figures:
            self._append(step, figures)

    def on_run_end(self, end: RunEnd) -> None:
        # A run that will be resumed gets no extra point, so its curve is that of a run without a stop.
        if end.completed and self._unwritten is not None:
            self._write_step()
        self._file.close()

    def _write_step(self) -> None:
        assert self._unwritten is not None
        self._append(self._unwritten.step, step_figures(self._unwritten, *self._throughput.take()))
        self._unwritten = None

    def _append(self, step: int, figures: Mapping[str, Any]) -> None:
        line = {"step": step, **{name: _jsonable(value) for name, value in figures.items()}}
        self._file.append(step, json.dumps(line))


def _jsonable(value: Any) -> Any:
    """Return None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rewind(path: Path, step: int) -> set[str]:
    """Drop the lines after `step` and torn lines, atomically; return the names of held-out metrics of `step` itself."""
    evaluated: set[str] = set()
    if not path.exists():
        return evaluated
    partial = partial_path(path)
    dropped = torn = 0
    try:
        with open(partial, "wb") as kept:
            for line, record in _lines(path):
                if record is None:
                    torn += 1
                elif record["step"] > step:
                    dropped += 1
                else:
                    kept.write(line)
                    if record["step"] == step:
                        evaluated.update(name for name in record if name.startswith("eval/"))
            kept.flush()
            os.fsync(kept.fileno())
        if dropped or torn:
            publish(partial, path)
            logger.info("%s: went back to step %d (%d later and %d torn lines dropped)", path, step, dropped, torn)
    finally:
        partial.unlink(missing_ok=True)
    return evaluated


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each line and its content, None for a torn line."""
    with open(path, "rb") as handle:
        for line in handle:
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            whole = line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("step"), int)
            yield line, record if whole else None


class TensorBoardWriter(Hook):
    """Writes a point to RUN/tensorboard every interval_steps; a resume purges the points after its step."""

    may_fail = True

    def __init__(self, directory: str | Path, interval_steps: int = 1) -> None:
        self.directory = Path(directory)
        self._interval_steps = interval_steps
        self._throughput = Throughput()
        self._writer: SummaryWriter | None = None

    def on_run_start(self, start: RunStart) -> None:
        self._open(start.step)

    def on_rollback(self, step: int) -> None:
        if self._writer is not None:
            self._writer.close()
        self._open(step)
        self._throughput = Throughput()

    def _open(self, step: int) -> None:
        """Open a file whose points replace those after `step`."""
        from torch.utils.tensorboard import SummaryWriter

        self.directory.mkdir(parents=True, exist_ok=True)
        self._writer = SummaryWriter(str(self.directory), purge_step=step + 1, flush_secs=30)

    def on_step_end(self, metrics: StepMetrics) -> None:
        self._throughput.add(metrics)
        if is_reported(metrics.step, self._interval_steps):
            figures = step_figures(metrics, *self._throughput.take())
            step = figures.pop("step")
            self._add({f"train/{name}": value for name, value in figures.items()}, step)

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        self._add(figures, step)
        if self._writer is not None:
            self._writer.flush()

    def on_run_end(self, end: RunEnd) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, figures: Mapping[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)
