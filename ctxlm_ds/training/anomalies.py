"""The policy for a loss or gradient that is not finite and for loss spikes.

Decisions depend only on the recipe, the step's metrics and TrainState, so all ranks decide the same, and so does a
restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ctxlm_ds.recipe.schema import AnomaliesConfig
from ctxlm_ds.training.state import TrainState

Action = Literal["go_on", "skip", "rollback", "stop"]


@dataclass(frozen=True, slots=True)
class Anomaly:
    """The reason why the gradients of a step must not be applied."""

    kind: Literal["non_finite", "spike"]
    why: str
    """The metric, its value and the step, as they are logged."""


LossJudge = Callable[[float], Anomaly | None]
"""Returns what is wrong with a finite loss of the global batch, or None."""


def accept_any(loss: float) -> Anomaly | None:
    """Judge no finite loss an anomaly."""
    return None


@dataclass(frozen=True, slots=True)
class Decision:
    """The action after an anomaly."""

    action: Action
    why: str = ""
    """The anomaly, and the exceeded limit if the run stops because of it."""


class AnomalyPolicy:
    """Judges losses and decides by the recipe's settings."""

    def __init__(self, config: AnomaliesConfig) -> None:
        self._config = config

    def judge(self, state: TrainState) -> LossJudge:
        """Return the judge of the step after `state`."""
        if self._config.spike == "ignore":
            return accept_any

        def find_spike(loss: float) -> Anomaly | None:
            window, threshold = self._config.spike_window_steps, self._config.spike_threshold
            if len(state.recent_losses) < window:
                return None
            mean, deviation = spread(state.recent_losses)
            if loss <= mean + threshold * deviation:
                return None
            return Anomaly(
                "spike",
                f"the loss of step {state.step + 1} is {loss:.6g}, more than {threshold:g} standard deviations "
                f"({deviation:.3g}) above the mean ({mean:.6g}) of the last {window} good steps",
            )

        return find_spike

    def decide(self, state: TrainState, anomaly: Anomaly) -> Decision:
        """Decide about an anomaly in the step after `state`."""
        action: Action = self._config.non_finite
        if anomaly.kind == "spike" and self._config.spike != "ignore":
            action = self._config.spike
        limits = self._config
        if action == "skip" and state.skips_in_a_row >= limits.max_skips:
            limit = f"{limits.max_skips} steps in a row were skipped before it (anomalies.max_skips)"
            return Decision("stop", f"{anomaly.why}, and {limit}")
        if action == "rollback" and state.rollbacks >= limits.max_rollbacks:
            limit = f"the run went back {limits.max_rollbacks} times before it (anomalies.max_rollbacks)"
            return Decision("stop", f"{anomaly.why}, and {limit}")
        return Decision(action, anomaly.why)

    def note_good(self, state: TrainState, loss: float) -> None:
        """Count a step whose update was applied."""
        state.skips_in_a_row = 0
        if self._config.spike != "ignore":
            state.recent_losses = [*state.recent_losses, loss][-self._config.spike_window_steps :]


def spread(losses: Sequence[float]) -> tuple[float, float]:
    """Return mean and population standard deviation, from correctly rounded sums."""
    mean = math.fsum(losses) / len(losses)
    return mean, math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses) / len(losses))
