"""Where a run stands: the few numbers that, with the weights and moments, determine all that follows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class TrainState:
    """Progress of a run; saved in every checkpoint."""

    step: int = 0
    """Optimizer steps done (skipped ones included)."""
    rows_consumed: int = 0
    """Rows of the endless training stream used or passed over: the data position."""
    tokens: int = 0
    """Non-padding positions seen."""
    skipped_steps: int = 0
    """Steps without an update: fp16 overflows, and batches that the policy for anomalies skipped."""
    skips_in_a_row: int = 0
    """Of the latest steps, how many that policy skipped."""
    rollbacks: int = 0
    """Times that the run went back to a checkpoint and passed over rows."""
    recent_losses: list[float] = field(default_factory=list)
    """Of the last good steps, oldest first: what a spike is measured against (anomalies.spike)."""
    seconds: float = 0.0
    """Wall time spent in training steps, over all restarts."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        known = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})
