"""The status of a run: a live table on a terminal, plain lines otherwise, and a summary at the end.

For others it is recorded: events of RUN/history.jsonl, RUN/status.json, and beats of the watchdog.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.console import format_duration, logger
from ctxlm_ds.process.failure import Watchdog
from ctxlm_ds.process.launch import RankInfo
from ctxlm_ds.process.run_files import FILE_ONLY, METRICS_NAME, read_status, update_status
from ctxlm_ds.process.run_history import END, START, append_event, attempt_folder, in_job, own_job_id
from ctxlm_ds.process.signals import StopSignal
from ctxlm_ds.recipe.words import STEPS_FOLLOW
from ctxlm_ds.registry import FAMILIES, OBJECTIVES
from ctxlm_ds.training.hooks.curves import LiveTable
from ctxlm_ds.training.hooks.hooks import Hook, IntervalHook, Phase, RunEnd, RunStart, StepMetrics, memory_bytes
from ctxlm_ds.training.hooks.metrics import TENSORBOARD_DIR

if TYPE_CHECKING:
    from ctxlm_ds.recipe.schema import TrainingConfig
    from ctxlm_ds.training.engine.engine import Engine

LATEST_CHECKPOINT = "checkpoints/latest"
"""Names the newest complete checkpoint of a run; written with it."""
ETA_STEPS = 50
RESUME = "to resume: the same command again"
LOG_VARIABLE = "CTXLM_LOG_FILE"
"""Names the job's log if the starter knows it; stderr of this process may be a pipe to the launcher."""


def how_to_resume(reason: str) -> str:
    """Return what to do about a run that ended early for this reason.

    The ranks of a Slurm job cannot know whether it was cancelled or continues; the job says so after them.
    """
    may_continue = in_job() and os.environ.get("CTXLM_RESTART") != "off" and "SIGINT" not in reason
    return "to resume, if the job was cancelled: submit the same command again" if may_continue else RESUME


class TimeLeft:
    """Time to the nearest limit, from the wall time of recent steps, evaluations and checkpoints included.

    The first step of a process, in which it warms up, does not count.
    """

    def __init__(self, start: RunStart) -> None:
        self._start = start
        self._begin_s = time.monotonic()
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=ETA_STEPS + 1)

    def update(self, metrics: StepMetrics) -> float | None:
        """Return the seconds left after this step, or None if unknown yet."""
        now_s = time.monotonic()
        self._marks.append((now_s, metrics.step, metrics.tokens))
        then_s, then_step, then_tokens = self._marks[0]
        passed_s, steps, tokens = now_s - then_s, metrics.step - then_step, metrics.tokens - then_tokens
        if steps <= 0:
            return None
        limits = self._start.config.training
        known = self._start.last_step < STEPS_FOLLOW
        left = [(self._start.last_step - metrics.step) * passed_s / steps] if known else []
        if limits.max_tokens is not None and tokens > 0:
            left.append((limits.max_tokens - metrics.tokens) * passed_s / tokens)
        if limits.max_hours is not None:
            left.append(limits.max_hours * 3600 - (now_s - self._begin_s))
        return max(0.0, min(left)) if left else None

    def go_back(self) -> None:
        """Start measuring again."""
        self._marks.clear()


def rough_moment(seconds_from_now: float, now_unix_s: float | None = None) -> str:
    """Format a moment to come: `14:00` today, `Tuesday 14:00` within six days, else `3 March 2026`."""
    now_s = time.time() if now_unix_s is None else now_unix_s
    try:
        now, then = time.localtime(now_s), time.localtime(now_s + seconds_from_now)
    except (OverflowError, ValueError, OSError):
        return "never"
    if seconds_from_now > 6 * 86_400:
        return f"{then.tm_mday} {time.strftime('%B %Y', then)}"
    return time.strftime("%H:%M" if now.tm_yday == then.tm_yday else "%A %H:%M", then)


class StatusHook(IntervalHook):
    """Shows a live table if stderr is a terminal, otherwise logs a line every interval_steps; ends with a summary."""

    def __init__(self, run_dir: str | Path, interval_steps: int = 10, stop_signal: StopSignal | None = None) -> None:
        super().__init__(interval_steps)
        self._run_dir = Path(run_dir)
        self._table: LiveTable | None = None
        self._stop_signal = stop_signal
        self._stops_after_view = False
        """True if a stop signal came while the table was drawn."""
        self._view: tuple[dict[str, str], float] | None = None
        """Cells and share of the view that is on the terminal."""
        self._loss: float | None = None
        self._figures: dict[str, float] = {}

    def on_run_start(self, start: RunStart) -> None:
        self._start = start
        self._time_left = TimeLeft(start)
        self._line_step = start.step
        if sys.stderr.isatty():
            self._table = LiveTable(f"{start.config.name} in {self._run_dir}", self._run_dir / METRICS_NAME)
            if self._stop_signal is not None:
                self._stop_signal.make_room = self._make_room

    def _make_room(self) -> bool:
        """Leave the table as it is for the line about a stop; False while it is drawn."""
        if self._table is not None and self._table.is_drawing:
            self._stops_after_view = True
            return False
        self._close_table()
        return True

    def _close_table(self) -> None:
        table, self._table = self._table, None
        if table is not None:
            table.close()

    def on_step_end(self, metrics: StepMetrics) -> None:
        self._loss = metrics.loss
        self._left_s = self._time_left.update(metrics)
        super().on_step_end(metrics)

    def is_due(self, step: int) -> bool:
        due = super().is_due(step) if self._table is None else self._table.is_due()
        return due or step >= self._start.last_step

    def report(self, metrics: StepMetrics, tokens_per_second: float, step_seconds: float) -> None:
        cells = status_cells(metrics, self._start.last_step, (tokens_per_second, step_seconds), self._left_s)
        if self._table is not None:
            left = f"{cells.pop('left')} left"
            done = left if self._left_s is None else f"{left}, done about {rough_moment(self._left_s)}"
            tokens = self._start.config.training.max_tokens
            share = max(metrics.step / self._start.last_step, metrics.tokens / tokens if tokens else 0.0)
            self._view = dict(cells), share
            self._table.show(*self._view, done, self._facts())
            if self._stops_after_view and self._stop_signal is not None:
                self._stops_after_view = False
                self._close_table()
                self._stop_signal.announce()
                return
            if metrics.step < self._line_step + self._interval_steps and metrics.step < self._start.last_step:
                return
            cells["left"] = left.removesuffix(" left")
        if self._left_s is None:
            del cells["left"]
        self._line_step = metrics.step
        line = " | ".join(f"{name} {value}" for name, value in cells.items())
        logger.info("%s", line, extra=FILE_ONLY if self._table is not None else None)

    def _facts(self) -> list[str]:
        """Return the last held-out losses and the age of the last checkpoint."""
        losses = {name: value for name, value in self._figures.items() if name.endswith("/loss")}
        facts = [f"held out at step {self._evaluated_step:,}: {figures_line(losses)}"] if losses else []
        latest = self._run_dir / LATEST_CHECKPOINT
        with contextlib.suppress(OSError):
            age_s, name = time.time() - latest.stat().st_mtime, latest.read_text(encoding="utf-8").strip()
            return [*facts, f"last checkpoint {name}, {format_duration(age_s)} ago"]
        return [*facts, "no checkpoint yet"]

    def on_rollback(self, step: int) -> None:
        super().on_rollback(step)
        self._time_left.go_back()
        self._line_step = step

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        self._figures.update(figures)
        self._evaluated_step = step
        logger.info("step %d held out: %s", step, figures_line(figures))

    def on_continuations(self, step: int, texts: Sequence[tuple[str, str]]) -> None:
        objective = OBJECTIVES.get(self._start.config.objective.name)
        what = "filled" if objective.masked_tokens else "continued" if objective.next_tokens else "written"
        for given, written in texts:
            logger.info("step %d %s: %s", step, what, " ".join(f"{given} | {written}".split()))

    def on_run_end(self, end: RunEnd) -> None:
        if self._table is not None and self._view is not None:  # with the last evaluation and checkpoint
            self._table.show(*self._view, "", self._facts(), is_last=True)
        self._close_table()
        for line in [f"{self._start.config.name}: {end.reason}"] if end.phase_over else self._summary(end):
            logger.info("%s", line)

    def _summary(self, end: RunEnd) -> Iterator[str]:
        """Yield what was done, the last metrics, the folder, and the command for the next step."""
        name, since_start = self._start.config.name, end.step - self._start.step
        tokens_per_second = end.tokens / max(end.total_seconds, 1e-9)
        yield f"{name}: {end.reason}"
        yield (
            f"  {end.step} steps ({since_start} since this start), {end.tokens:,} tokens in "
            f"{format_duration(end.total_seconds)} of training ({tokens_per_second:,.0f} tokens/s)"
        )
        if self._loss is not None:
            yield f"  last training loss {self._loss:.4f}"
        yield from (f"  held out: {part}" for part in figures_line(self._figures).split("; ") if part)
        points = (self._run_dir / TENSORBOARD_DIR).is_dir()
        written = "checkpoints, metrics.jsonl and tensorboard" if points else "checkpoints and metrics.jsonl"
        yield f"  {written} are in {self._run_dir}"
        if end.failed:
            return
        if not end.completed:
            yield f"  {how_to_resume(end.reason)}"
        family = FAMILIES.get(self._start.config.model.family)
        if family.export is not None or family.own_format is not None:
            run, output = (shlex.quote(str(path)) for path in (self._run_dir, self._run_dir / "hf"))
            yield f"  to export: ctxlm convert to-hf --checkpoint {run} --output {output}"


def status_cells(
    metrics: StepMetrics, last_step: int, speed: tuple[float, float], left_s: float | None
) -> dict[str, str]:
    """Format the status by heading; `speed` is in tokens per second and seconds per step, `left_s` in seconds."""
    cells = {"step": f"{metrics.step}/{last_step if last_step < STEPS_FOLLOW else '?'}", "loss": f"{metrics.loss:.4f}"}
    if len(metrics.terms) > 1:
        cells |= {name: f"{value:.4f}" for name, value in metrics.terms.items()}
    cells["lr"] = f"{metrics.learning_rate:.2e}"
    if metrics.grad_norm is not None:
        cells["grad norm"] = f"{metrics.grad_norm:.2f}"
    if metrics.loss_scale is not None:
        cells["loss scale"] = f"{metrics.loss_scale:g}"
    cells["tokens/s"] = f"{speed[0]:,.0f}"
    cells["s/step"] = f"{speed[1]:.2f}"
    cells["left"] = "?" if left_s is None else format_duration(left_s)
    cells["memory"] = f"{memory_bytes() / 1e9:.2f} GB"
    return cells


def figures_line(figures: Mapping[str, float]) -> str:
    """Format `eval/wiki/loss` and others as `wiki loss 3.2100, masked_lm_accuracy 0.4120`; sources end with `; `."""
    by_source: dict[str, list[str]] = {}
    for name, value in figures.items():
        source, _, figure = name.removeprefix("eval/").rpartition("/")
        by_source.setdefault(source, []).append(f"{figure} {value:.4f}")
    return "; ".join(f"{source} {', '.join(texts)}" for source, texts in by_source.items())


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
        stderr = os.path.realpath("/proc/self/fd/2")  # maybe a terminal or a pipe
        log = os.environ.get(LOG_VARIABLE) or (stderr if os.path.isfile(stderr) else None)
        place = {"job_id": own_job_id(), "attempt": attempt_folder(self._run_dir).name, "log": log}
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
            failed=end.failed, phase_over=end.phase_over, attempt=attempt_folder(self._run_dir).name,
        )  # fmt: skip
        state = "failed" if end.failed else "completed" if end.completed else "stopped"
        state = "running" if end.phase_over else state
        changes = {"last_failure": why} if end.failed else {}
        update_status(
            self._run_dir, state=state, why=why, step=end.step, left_s=None, checkpoint=self._last_good(), **changes
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
