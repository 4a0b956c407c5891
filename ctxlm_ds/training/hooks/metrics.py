"""Metrics on disk: RUN/metrics.jsonl (one object per line) and RUN/tensorboard, one curve over all restarts.

A resume at step k drops what was written after k.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import indent
from typing import Any

from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import logger
from ctxlm_ds.process.run_files import HELD_OUT, TEXTS, LineFile, parse_line
from ctxlm_ds.recipe.hardware import GPUS, TERA
from ctxlm_ds.recipe.load import dump_config
from ctxlm_ds.training.hooks.hooks import IntervalHook, RunEnd, RunStart, StepMetrics, memory_bytes

TENSORBOARD_DIR = "tensorboard"
BY_TOKEN = "by_token"
_MARKDOWN = re.compile(r"[\\`*_{}\[\]()#+\-.!]")


def step_figures(
    metrics: StepMetrics,
    tokens_per_second: float,
    step_seconds: float,
    rows_per_second: float = 0.0,
    peak_row_seconds: float | None = None,
) -> dict[str, Any]:
    """Return the metrics of one line or point: loss terms by name, TERM_accuracy, and the rest.

    `peak_row_seconds` is the time of a row at the devices' peak, None if it is unknown; so is a speed of 0.
    """
    counts_skips = metrics.loss_scale is not None or metrics.skipped_steps
    figures = {
        "loss": metrics.loss,
        **metrics.terms,
        **{f"{term}_accuracy": value for term, value in metrics.accuracy.items()},
        "learning_rate": metrics.learning_rate,
        "grad_norm": metrics.grad_norm,
        "epoch": metrics.epoch,
        "tokens": metrics.tokens,
        "tokens_per_second": round(tokens_per_second, 1),
        "rows_per_second": round(rows_per_second, 3) if rows_per_second else None,
        "mfu": round(rows_per_second * peak_row_seconds, 5) if rows_per_second and peak_row_seconds else None,
        "step_seconds": round(step_seconds, 6),
        "total_seconds": round(metrics.total_seconds, 3),
        "memory_bytes": memory_bytes(),
        "loss_scale": metrics.loss_scale,
        "skipped_steps": metrics.skipped_steps if counts_skips else None,
        "rollbacks": metrics.rollbacks or None,
    }
    return {name: value for name, value in figures.items() if value is not None}


class FigureHook(IntervalHook):
    """Writes the figures of each reported step; `peak_row_seconds` is as for `step_figures`."""

    may_fail = True

    def __init__(self, interval_steps: int, peak_row_seconds: float | None = None) -> None:
        super().__init__(interval_steps)
        self._peak_row_seconds = peak_row_seconds

    def report(self, metrics: StepMetrics, tokens_per_second: float, step_seconds: float) -> None:
        speeds = tokens_per_second, step_seconds, self.rows_per_second
        self.write(metrics.step, step_figures(metrics, *speeds, self._peak_row_seconds))

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Write the figures of a step in training."""


class MetricsWriter(FigureHook):
    """Appends a line to metrics.jsonl every interval_steps, complete and immediately.

    A line has the losses of its step; tokens_per_second and step_seconds are means since the line before.
    """

    def __init__(self, path: str | Path, interval_steps: int = 1, peak_row_seconds: float | None = None) -> None:
        super().__init__(interval_steps, peak_row_seconds)
        self.path = Path(path)
        self._file = LineFile(self.path)

    def on_run_start(self, start: RunStart) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Nothing of an earlier start is kept at step 0: its weights may be others.
        self.on_rollback(start.step or -1)

    def on_rollback(self, step: int) -> None:
        super().on_rollback(step)
        self._file.forget_after(step)
        self._resumed_step, self._evaluated = step, rewind(self.path, step)

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        if step == self._resumed_step:
            figures = {name: value for name, value in figures.items() if name not in self._evaluated}
        if figures:
            self.write(step, figures)

    def on_continuations(self, step: int, texts: Sequence[tuple[str, str]]) -> None:
        self.write(step, {TEXTS: [list(text) for text in texts]})

    def on_run_end(self, end: RunEnd) -> None:
        # A run that will be resumed gets no extra point, so its curve is that of a run without a stop.
        if end.completed:
            self.report_last_step()
        self._file.close()

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        # JSON has neither NaN nor infinity.
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in figures.items()
        }
        self._file.append(step, json.dumps({"step": step, **finite}))


def rewind(path: Path, step: int) -> set[str]:
    """Drop the lines after `step` and torn lines, atomically; return the names of held-out metrics of `step` itself."""
    evaluated: set[str] = set()
    kept: list[bytes] = []
    dropped = torn = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        record = parse_line(line)
        if record is None:
            torn += 1
        elif record["step"] > step:
            dropped += 1
        else:
            kept.append(line)
            if record["step"] == step:
                evaluated.update(name for name in record if name.startswith(HELD_OUT))
    if dropped or torn:
        write_text(path, b"".join(kept).decode())
        logger.info("%s: went back to step %d (%d later and %d torn lines dropped)", path, step, dropped, torn)
    return evaluated


class TensorBoardWriter(FigureHook):
    """Writes a point to RUN/tensorboard every interval_steps; a resume purges the points after its step.

    The metrics over tokens are in its folder by_token: a purge is of all points of a folder by their number.
    """

    package = switch = "tensorboard"

    def __init__(self, run_dir: str | Path, interval_steps: int = 1, peak_row_seconds: float | None = None) -> None:
        super().__init__(interval_steps, peak_row_seconds)
        self.directory = Path(run_dir) / TENSORBOARD_DIR

    def on_run_start(self, start: RunStart) -> None:
        from torch.utils.tensorboard.summary import hparams

        self._tokens_now = start.tokens
        self._back_to: int | None = None
        self._open(start.step, start.tokens)
        self._writer.add_text("recipe", indent(dump_config(start.config), "    "), start.step)
        # For TensorBoard's HParams, in the same run as the curves.
        flat = {name: x if isinstance(x, bool | int | float) else str(x) for name, x in start.config.flat().items()}
        for summary in hparams(flat, {"train/loss": 0.0}):
            self._writer.file_writer.add_summary(summary)

    def on_rollback(self, step: int) -> None:
        super().on_rollback(step)
        self._close()
        # The next step knows the tokens before it.
        self._back_to = step

    def on_step_end(self, metrics: StepMetrics) -> None:
        if self._back_to is not None:
            self._open(self._back_to, metrics.tokens - metrics.step_tokens)
            self._back_to = None
        self._tokens_now = metrics.tokens
        super().on_step_end(metrics)

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        self._add({f"train/{name}": value for name, value in figures.items()}, step)

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        self._add(figures, step)
        self._writer.flush()
        self._by_token.flush()

    def on_continuations(self, step: int, texts: Sequence[tuple[str, str]]) -> None:
        # Markdown that shows the texts' characters as they are.
        shown = ((escape(_MARKDOWN.sub(r"\\\g<0>", " ".join(text.split()))) for text in pair) for pair in texts)
        paragraphs = (f"{given} **{written}**" if written else given for given, written in shown)
        self._writer.add_text("continuations", "\n\n".join(paragraphs), step)
        self._writer.flush()

    def on_run_end(self, end: RunEnd) -> None:
        self._close()

    def _close(self) -> None:
        self._writer.close()
        self._by_token.close()

    def _open(self, step: int, tokens: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Points of an earlier start at step 0 belong to no checkpoint.
        purged, purged_tokens = (step + 1, tokens + 1) if step else (0, 0)
        self._writer = SummaryWriter(str(self.directory), purge_step=purged, flush_secs=30)
        self._by_token = SummaryWriter(str(self.directory / BY_TOKEN), purge_step=purged_tokens, flush_secs=30)

    def _add(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
            if name != "train/tokens":
                self._by_token.add_scalar(f"{BY_TOKEN}/{name.removeprefix('train/')}", value, self._tokens_now)


NAMES = {
    "H200": ("NVIDIA H200",),
    "H100": ("NVIDIA H100 80GB HBM3",),
    "A100-80": ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
    "A100-40": ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
    "V100-32": ("Tesla V100-SXM2-32GB", "Tesla V100-SXM2-16GB"),
}
"""GPUs of recipe/hardware.py by the names that CUDA gives them; PCIe models are listed if they have the same peak."""


def peak_row_seconds(
    peak_tflops: float | None, precision: str, world_size: int, row_flops: Callable[[], float]
) -> float | None:
    """Return the seconds of a row if all devices computed at their peak; None if the peak is unknown.

    The run's rows per second times this is the MFU. `row_flops` counts a row; it is not called without a peak. Without
    `peak_tflops` the published dense peak of this process's GPU counts.
    """
    import torch

    if peak_tflops is None and torch.cuda.is_available():
        peak_tflops = published_peak_tflops(torch.cuda.get_device_name(), precision)
    return None if peak_tflops is None else row_flops() / (TERA * peak_tflops * world_size)


def published_peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the dense peak of a GPU by CUDA's name of it, 1e12 operations per second; None if it is not listed."""
    kind = next((kind for kind, names in NAMES.items() if device_name in names), None)
    return next((gpu.flops_per_s(precision) / TERA for gpu in GPUS if gpu.name == kind), None)
