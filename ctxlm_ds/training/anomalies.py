"""What a run does about a loss or gradient that is not finite, and about a loss spike.

In: the recipe's `anomalies`, figures of each step (alike on every rank). Out: an action, alike on every rank: all that
it rests on stands in TrainState, so that a restart decides as the run before it did. Not here: how an update is
refused (update.py), going back (trainer.py), what is logged (anomaly_log.py).
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
    """Why a step's gradients must not be applied."""

    kind: Literal["non_finite", "spike"]
    why: str
    """For a person: the figure, its value, the step."""


LossJudge = Callable[[float], Anomaly | None]
"""What is wrong with a finite loss of the whole global batch; None where it may be learnt from."""


def accept_any(loss: float) -> Anomaly | None:
    """The judge of a run that does not look for spikes."""
    return None


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows a step."""

    action: Action
    why: str = ""
    """Of the anomaly, with the limit that was reached where the run stops for it."""


class AnomalyPolicy:
    """Judges losses and decides, as the recipe says.

    Args:
        config: the recipe's section.
    """

    def __init__(self, config: AnomaliesConfig) -> None:
        self._config = config

    def judge(self, state: TrainState) -> LossJudge:
        """The judge of the step that comes after `state`."""
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
        """What to do about an anomaly in the step after `state`."""
        action: Action = self._config.non_finite
        if anomaly.kind == "spike" and self._config.spike != "ignore":
            action = self._config.spike
        limits = self._config
        if action == "skip" and state.skips_in_a_row >= limits.max_skips:
            told = f"{limits.max_skips} steps in a row were skipped before it (anomalies.max_skips)"
            return Decision("stop", f"{anomaly.why}, and {told}")
        if action == "rollback" and state.rollbacks >= limits.max_rollbacks:
            told = f"the run went back {limits.max_rollbacks} times before it (anomalies.max_rollbacks)"
            return Decision("stop", f"{anomaly.why}, and {told}")
        return Decision(action, anomaly.why)

    def note_good(self, state: TrainState, loss: float) -> None:
        """Count a step whose update was applied."""
        state.skips_in_a_row = 0
        if self._config.spike != "ignore":
            state.recent_losses = [*state.recent_losses, loss][-self._config.spike_window_steps :]


def spread(losses: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (of the whole, not of a sample), correctly rounded sums."""
    mean = math.fsum(losses) / len(losses)
    return mean, math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses) / len(losses))
