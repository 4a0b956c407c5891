"""Learning rates by step, in plain Python: the same number on every rank and after every resume."""

from __future__ import annotations

import math

from ctxlm_ds.recipe.check import resolve_warmup
from ctxlm_ds.recipe.schema import ScheduleConfig

INVERSE_SQRT_TIMESCALE_STEPS = 10_000


class LearningRateSchedule:
    """A linear warmup from 0 to the peak, then the named decay to the final rate.

    `at(step)` follows transformers' `get_*_schedule` (LambdaLR): it is the rate of the update after `step` completed
    ones. With a warmup the first update has rate 0, as in BERT's code. NVIDIA's scheduler is one step ahead:
    `start_step` 1 with `total_steps` equal to max_steps.
    """

    def __init__(self, config: ScheduleConfig, peak: float, max_steps: int) -> None:
        """`peak`: highest learning rate; `max_steps`: optimizer steps of this run."""
        self.config = config
        self.peak = peak
        self.total_steps = config.total_steps or config.start_step + max_steps
        self.warmup_steps = resolve_warmup(config.warmup_steps, config.warmup_fraction, self.total_steps)
        self.decay_steps = round(config.decay_fraction * self.total_steps)

    def at(self, step: int) -> float:
        """Return the learning rate of the update after `step` completed updates of this run."""
        position = self.config.start_step + step
        if position < self.warmup_steps:
            if self.config.warmup_shape == "constant":
                return self.peak
            return self.peak * position / self.warmup_steps
        if self.config.name == "constant":
            return self.peak
        final = self.config.final_learning_rate
        if self.config.name == "inverse_sqrt":
            # 1 at the end of the warmup, then the inverse root of the step (Vaswani 2017).
            timescale = self.warmup_steps or INVERSE_SQRT_TIMESCALE_STEPS
            return max(final, self.peak * math.sqrt(timescale / (position - self.warmup_steps + timescale)))
        return final + (self.peak - final) * self._remaining(position)

    def _remaining(self, position: int) -> float:
        """Return the part of the decay that remains, from 1 down to 0 at total_steps and later."""
        if position >= self.total_steps:
            return 0.0
        name = self.config.name
        if name == "wsd":
            left = self.total_steps - position
            share = min(1.0, left / self.decay_steps) if self.decay_steps else 1.0
            return share if self.config.decay_shape == "linear" else 1.0 - math.sqrt(1.0 - share)
        start = self.warmup_steps
        if name in ("linear", "polynomial", "cosine") and self.config.decay_from == "start":
            start = 0
        progress = (position - start) / (self.total_steps - start)
        if name == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        return (1.0 - progress) ** (self.config.power if name == "polynomial" else 1.0)
