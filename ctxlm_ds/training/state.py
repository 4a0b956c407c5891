"""Where a run stands: the few numbers that, with the weights and moments, determine all that follows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(slots=True)
class TrainState:
    """Progress of a run; saved in every checkpoint."""

    step: int = 0
    """Optimizer steps done (skipped fp16 steps included)."""
    rows_consumed: int = 0
    """Rows of the endless training stream used: the data position."""
    tokens: int = 0
    """Non-padding positions seen."""
    skipped_steps: int = 0
    """Steps whose update fp16 overflow skipped."""
    seconds: float = 0.0
    """Wall time spent in training steps, over all restarts."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})
