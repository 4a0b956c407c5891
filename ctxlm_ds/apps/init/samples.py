"""Steps that a number of samples takes, along the ramp of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from ctxlm_ds.recipe.schema import TrainingConfig

MAX_RAMP_STEPS = 5_000_000


def steps_of_samples(samples: int, batch: int, ramp: Sequence[Any] | None) -> int | None:
    """Return the steps of a run over `samples` rows, as Megatron counts them: the last incomplete step is left out.

    None if the ramp is not START INCREMENT ROWS, or has too many steps to count.
    """
    if ramp is None:
        return samples // batch
    try:
        training = TrainingConfig.model_validate({"global_batch_size": batch, "batch_ramp": [*ramp]})
        assert training.batch_ramp is not None
        start, _, rows = training.batch_ramp
        steps = rows_read = 0
        if min(rows, samples) // start > MAX_RAMP_STEPS:
            return None
        while rows_read <= rows and rows_read < samples:
            rows_read, steps = rows_read + training.batch_size_at(rows_read), steps + 1
    except (ValidationError, ZeroDivisionError):
        return None
    return steps + max(0, samples - rows_read) // batch
