"""Recovery from a bad batch: skip it, or go back to a checkpoint and continue with the rows after it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.data.stream.preview import BatchRows, summary
from ctxlm_ds.errors import TrainingError
from ctxlm_ds.process.run_history import ANOMALY, ROLLBACK, SKIP, append_event
from ctxlm_ds.training.anomalies import AnomalyPolicy, LossJudge
from ctxlm_ds.training.state import TrainState
from ctxlm_ds.training.step_metrics import StepResult

logger = logging.getLogger("ctxlm_ds")


class AnomalyLog:
    """Records anomalies of one run as a warning and an event of RUN/history.jsonl.

    Args:
        run_dir: the run directory.
        rows: looks up the rows of a batch; None on every rank but rank 0, which alone records.
    """

    def __init__(self, run_dir: Path, rows: BatchRows | None) -> None:
        self._run_dir = run_dir
        self._rows = rows

    def warn(self, why: str, consequence: str, first_row: int, num_rows: int) -> None:
        """Log a warning that names the rows of the batch."""
        if self._rows is not None:
            logger.warning(
                "%s: %s. Its batch is rows %d to %d of the training stream: %s", why, consequence, first_row,
                first_row + num_rows - 1, summary(self._rows.by_source(first_row, num_rows)),
            )  # fmt: skip

    def record(
        self, event: str, step: int, why: str, result: StepResult, first_row: int, num_rows: int, **more: Any
    ) -> None:
        """Append an event.

        Args:
            event: its name in run_history.
            step: number of the step, counted from 1, as in metrics.jsonl.
            why: the anomaly.
            result: metrics of the step.
            first_row: position of the batch in the training stream.
            num_rows: rows of the global batch.
            more: further values.
        """
        if self._rows is None:
            return
        sources = [source._asdict() for source in self._rows.by_source(first_row, num_rows)]
        # JSON has no NaN or infinity.
        loss, norm = (value if math.isfinite(value) else None for value in (result.loss, result.grad_norm))
        rows = {"first": first_row, "count": num_rows, "sources": sources}
        append_event(self._run_dir, event, step=step, why=why, loss=loss, grad_norm=norm, rows=rows, **more)


class Recovery:
    """Responds to anomalies; all ranks call its methods together.

    Args:
        policy: decides what is done.
        log: records it.
        load_last_good: restores the newest intact checkpoint, or the beginning of the run; returns its state.
        steps_from: returns the training steps from a row on and ends the previous ones.
    """

    def __init__(
        self,
        policy: AnomalyPolicy,
        log: AnomalyLog,
        load_last_good: Callable[[], TrainState],
        steps_from: Callable[[int], Iterable[Step]],
    ) -> None:
        self._policy = policy
        self._log = log
        self._load_last_good = load_last_good
        self._steps_from = steps_from

    def judge(self, state: TrainState) -> LossJudge:
        """Return the judge of the step after `state`."""
        return self._policy.judge(state)

    def must_go_back(self, state: TrainState, step: Step, result: StepResult) -> bool:
        """Note a good step after `state`; record one that is skipped or that ends the run.

        Raises:
            TrainingError: the run must stop.
        """
        if result.anomaly is None:
            if not result.skipped:
                self._policy.note_good(state, result.loss)
            return False
        decision = self._policy.decide(state, result.anomaly)
        number, batch = state.step + 1, (state.rows_consumed, step.rows_consumed)
        if decision.action == "stop":
            self._log.warn(decision.why, "the update was not applied, the run stops", *batch)
            self._log.record(ANOMALY, number, decision.why, result, *batch)
            raise TrainingError(decision.why)
        if decision.action == "skip":
            state.skips_in_a_row += 1
            self._log.warn(decision.why, "the batch is skipped", *batch)
            self._log.record(SKIP, number, decision.why, result, *batch)
        return decision.action == "rollback"

    def go_back(self, state: TrainState, step: Step, result: StepResult) -> tuple[TrainState, Iterable[Step]]:
        """Restore the last good checkpoint; return its state and the steps that begin after the bad batch.

        Raises:
            CheckpointError: no checkpoint can be read.
        """
        assert result.anomaly is not None
        why, batch = result.anomaly.why, (state.rows_consumed, step.rows_consumed)
        self._log.warn(why, "the run goes back to its last good checkpoint and passes over the rows since", *batch)
        good = self._load_last_good()
        first_passed, next_row = good.rows_consumed, state.rows_consumed + step.rows_consumed
        good.rows_consumed = next_row
        good.rollbacks = state.rollbacks + 1
        passed = {"first": first_passed, "count": next_row - first_passed}
        self._log.record(ROLLBACK, state.step + 1, why, result, *batch, to_step=good.step, passed_over=passed)
        return good, self._steps_from(next_row)
