"""Recovery from a bad batch (a loss or gradient norm that is not finite, a loss spike): stop, skip it, or go back.

Decisions depend only on the recipe, the step's result and TrainState, so all ranks decide the same, and so does a
restart.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal

from ctxlm_ds.console import logger
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.data.stream.preview import BatchRows, summary
from ctxlm_ds.errors import TrainingError
from ctxlm_ds.process.run_history import ANOMALY, ROLLBACK, SKIP, append_event
from ctxlm_ds.recipe.schema import AnomaliesConfig
from ctxlm_ds.training.loop.state import Anomaly, StepResult, TrainState

Action = Literal["skip", "rollback", "stop"]


@dataclass(frozen=True)
class Recovery:
    """Responds to anomalies; all ranks call its methods together.

    `rows` looks up the rows of a batch on rank 0, which alone logs and records. `load_last_good` restores the newest
    intact checkpoint, or the beginning, and returns its state; `steps_from` ends the present steps and returns those
    from a row on.
    """

    config: AnomaliesConfig
    run_dir: Path
    rows: BatchRows | None
    load_last_good: Callable[[], TrainState]
    steps_from: Callable[[int], Iterable[Step]]

    def find_spike(self, state: TrainState, loss: float) -> Anomaly | None:
        """Return what is wrong with a finite loss of the step after `state`, or None."""
        window, threshold = self.config.spike_window_steps, self.config.spike_threshold
        if self.config.spike == "ignore" or len(state.recent_losses) < window:
            return None
        mean, deviation = fmean(state.recent_losses), pstdev(state.recent_losses)
        if loss <= mean + threshold * deviation:
            return None
        return Anomaly(
            "spike",
            f"the loss of step {state.step + 1} is {loss:.6g}, more than {threshold:g} standard deviations "
            f"({deviation:.3g}) above the mean ({mean:.6g}) of the last {window} good steps",
        )

    def note_good(self, state: TrainState, loss: float) -> None:
        """Count a step whose update was applied."""
        state.skips_in_a_row = 0
        if self.config.spike != "ignore":
            state.recent_losses = [*state.recent_losses, loss][-self.config.spike_window_steps :]

    def decide(self, state: TrainState, anomaly: Anomaly) -> tuple[Action, str]:
        """Return the action after an anomaly in the step after `state`, and its reason with an exceeded limit."""
        config = self.config
        action = getattr(config, anomaly.kind)
        if action == "skip" and state.skips_in_a_row >= config.max_skips:
            limit = f"{config.max_skips} steps in a row were skipped before it (anomalies.max_skips)"
        elif action == "rollback" and state.rollbacks >= config.max_rollbacks:
            limit = f"the run went back {config.max_rollbacks} times before it (anomalies.max_rollbacks)"
        else:
            return action, anomaly.why
        return "stop", f"{anomaly.why}, and {limit}"

    def must_go_back(self, state: TrainState, step: Step, result: StepResult) -> bool:
        """Note a good step after `state`; record one that is skipped, or raise TrainingError if the run must stop."""
        batch = [state.rows_consumed, state.rows_consumed + step.rows_consumed]
        if result.anomaly is None:
            if result.skipped:
                state.skipped_rows.append(batch)
            else:
                self.note_good(state, result.loss)
            return False
        action, why = self.decide(state, result.anomaly)
        if action == "stop":
            self._warn(state, step, f"{why}: the update was not applied, the run stops")
            self._record(ANOMALY, state, step, result, why)
            raise TrainingError(
                f"{why}. ctxlm batch {shlex.quote(str(self.run_dir))} lists the batch. Start again with a lower "
                "learning rate, gradient clipping, or precision bf16/fp32; or skip such batches with "
                "anomalies.non_finite skip or rollback (docs/reliability.md)"
            )
        if action == "skip":
            state.skips_in_a_row += 1
            state.skipped_rows.append(batch)
            self._warn(state, step, f"{why}: the batch is skipped")
            self._record(SKIP, state, step, result, why)
        return action == "rollback"

    def go_back(self, state: TrainState, step: Step, result: StepResult) -> tuple[TrainState, Iterable[Step]]:
        """Restore the last good checkpoint; return its state and the steps that begin after the bad batch."""
        assert result.anomaly is not None
        why, next_row = result.anomaly.why, state.rows_consumed + step.rows_consumed
        self._warn(state, step, f"{why}: the run goes back to its last good checkpoint and passes over the rows since")
        good = self.load_last_good()
        passed = {"first": good.rows_consumed, "count": next_row - good.rows_consumed}
        good.rolled_back_rows.append([good.rows_consumed, next_row])
        good.rows_consumed, good.rollbacks = next_row, state.rollbacks + 1
        self._record(ROLLBACK, state, step, result, why, to_step=good.step, passed_over=passed)
        return good, self.steps_from(next_row)

    def _warn(self, state: TrainState, step: Step, text: str) -> None:
        if self.rows is not None:
            first, count = state.rows_consumed, step.rows_consumed
            logger.warning(
                "%s. Its batch is rows %d to %d of the training stream: %s",
                text, first, first + count - 1, summary(self.rows.by_source(first, count)),
            )  # fmt: skip

    def _record(self, event: str, state: TrainState, step: Step, result: StepResult, why: str, **more: Any) -> None:
        """Append an event to the history; its step counts from 1, as in metrics.jsonl."""
        if self.rows is None:
            return
        first, count = state.rows_consumed, step.rows_consumed
        sources = [source._asdict() for source in self.rows.by_source(first, count)]
        # JSON has no NaN or infinity.
        loss, norm = (value if math.isfinite(value) else None for value in (result.loss, result.grad_norm))
        rows = {"first": first, "count": count, "sources": sources}
        append_event(self.run_dir, event, step=state.step + 1, why=why, loss=loss, grad_norm=norm, rows=rows, **more)
