"""A bad batch on record: a warning, and an event of RUN/history.jsonl with the rows of the whole global batch.

In: figures of the step and its place in the training stream. Out: one log line and one event, by rank 0.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from ctxlm_ds.data.stream.lookup import BatchRows, summary
from ctxlm_ds.process.run_history import append_event
from ctxlm_ds.training.figures import StepResult

logger = logging.getLogger("ctxlm_ds")


class AnomalyLog:
    """Records anomalies of one run.

    Args:
        run_dir: the run directory.
        rows: looks up the rows of a batch; None on every rank but rank 0, which alone records.
    """

    def __init__(self, run_dir: Path, rows: BatchRows | None) -> None:
        self._run_dir = run_dir
        self._rows = rows

    def warn(self, why: str, consequence: str, first_row: int, num_rows: int) -> None:
        """The line in the log."""
        if self._rows is not None:
            logger.warning(
                "%s: %s. Its batch is rows %d to %d of the training stream: %s", why, consequence, first_row,
                first_row + num_rows - 1, summary(self._rows.by_source(first_row, num_rows)),
            )  # fmt: skip

    def record(
        self, event: str, step: int, why: str, result: StepResult, first_row: int, num_rows: int, **more: Any
    ) -> None:
        """The event.

        Args:
            event: its name in run_history.
            step: number of the step, counted from 1, as in metrics.jsonl.
            why: what is wrong.
            result: of the step.
            first_row: place of the batch in the training stream.
            num_rows: rows of the global batch.
            more: further values.
        """
        if self._rows is None:
            return
        sources = [part.to_dict() for part in self._rows.by_source(first_row, num_rows)]
        append_event(
            self._run_dir,
            event,
            step=step,
            why=why,
            loss=_finite(result.loss),
            grad_norm=_finite(result.grad_norm),
            rows={"first": first_row, "count": num_rows, "sources": sources},
            **more,
        )


def _finite(value: float) -> float | None:
    """JSON knows no NaN or infinity; null stands for them."""
    return value if math.isfinite(value) else None
