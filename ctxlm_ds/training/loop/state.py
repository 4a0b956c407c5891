"""The progress of a run, and the result of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ctxlm_ds.data.stream.loader import Step


@dataclass(slots=True)
class TrainState:
    """Counters that, with weights and moments, determine all later steps; saved in every checkpoint."""

    step: int = 0
    """Optimizer steps done, including skipped ones."""
    rows_consumed: int = 0
    """Rows of the training stream used or passed over: the data position."""
    tokens: int = 0
    """Non-padding positions seen."""
    words: int = 0
    """White-space words read, as data/stream/run_plan.py counts them; 0 if the datasets have no counts."""
    reached_words: int = 0
    """The largest of checkpoint.at_words that the last step reached; 0 for none."""
    skipped_steps: int = 0
    """Steps without an update: fp16 overflows and skipped batches."""
    skips_in_a_row: int = 0
    """Batches that the policy for anomalies skipped since the last good step."""
    rollbacks: int = 0
    """Times that the run went back to a checkpoint and passed over rows."""
    recent_losses: list[float] = field(default_factory=list)
    """Losses of the last good steps, oldest first, against which spikes are measured."""
    seconds: float = 0.0
    """Wall time spent in training steps, over all restarts."""
    decay: list[int] = field(default_factory=list)
    """Steps of the phase at which a decay by wall time (LearningRateSchedule.plan) begins and ends; empty before."""
    skipped_rows: list[list[int]] = field(default_factory=list)
    """[first, after] positions in the stream of batches whose gradients were not applied."""
    rolled_back_rows: list[list[int]] = field(default_factory=list)
    """The same of the rows that rollbacks passed over."""
    phase: int = 0
    """Number of the phase, from 0."""
    first_step: int = 0
    """Steps before this phase; its masks, dropout and schedule count from there."""
    first_row: int = 0
    """Value of rows_consumed at the beginning of this phase."""
    first_words: int = 0
    first_seconds: float = 0.0

    def begin_phase(self, number: int, continues: bool) -> TrainState:
        """Return the state at the beginning of the next phase; `continues`: its rows follow those before."""
        row = self.rows_consumed if continues else 0
        return replace(
            self, phase=number, rows_consumed=row, first_row=row, first_step=self.step, first_words=self.words,
            first_seconds=self.seconds, skips_in_a_row=0, recent_losses=[], decay=[],
            skipped_rows=self.skipped_rows if continues else [],
            rolled_back_rows=self.rolled_back_rows if continues else [],
        )  # fmt: skip

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        known = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True, slots=True)
class Anomaly:
    """The reason why the gradients of a step must not be applied."""

    kind: Literal["non_finite", "spike"]
    why: str
    """The metric, its value and the step, as they are logged."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a rank knows at the end of a step in addition to its losses."""

    next_step: Step | None = None
    """This rank's part of the step that follows; None if there is none."""
    flags: Sequence[float] = ()
    """Numbers that are added up over the ranks, as many on every rank."""


class StepInterrupted(Exception):
    """A step was abandoned between two micro-batches because a rank was asked to stop."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Metrics of one optimizer step over the global batch."""

    loss: float
    terms: dict[str, float]
    """Mean loss of each term over its predictions."""
    accuracy: dict[str, float]
    grad_norm: float
    num_tokens: int
    """Non-padding positions of the global batch."""
    skipped: bool
    """True if nothing was updated: fp16 overflowed, or there is an anomaly."""
    loss_scale: float
    anomaly: Anomaly | None = None
    """Why the gradients were not applied; None for an fp16 overflow that a lower loss scale handles."""
    flags: tuple[float, ...] = ()
    """The ranks' flags, added up (Ahead)."""
