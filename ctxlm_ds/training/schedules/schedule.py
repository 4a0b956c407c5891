"""Learning rates by step, in plain Python: the same number on every rank and after every resume.

Each schedule is a section with its settings and a class with its decay. One line of registry.py names it; other
packages use an entry point (docs/extending.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from ctxlm_ds.errors import TrainingError
from ctxlm_ds.recipe.check import total_schedule_steps, warmup_schedule_steps
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import PositiveFloat, PositiveSteps, Probability, ScheduleSection, Section, SmallInt
from ctxlm_ds.registry import SCHEDULES

INVERSE_SQRT_TIMESCALE_STEPS = 10_000


class LearningRateSchedule:
    """A warmup to the peak, then the decay of the named schedule to the final rate.

    `at(step)` follows transformers' `get_*_schedule` (LambdaLR): it is the rate of the update after `step` completed
    ones. With a linear warmup the first update has rate 0, as in BERT's code. NVIDIA's scheduler is one step ahead:
    `start_step` 1 with `total_steps` equal to max_steps.
    """

    def __init__(self, settings: ScheduleSection, peak: float, max_steps: int) -> None:
        """`peak`: highest learning rate; `max_steps`: optimizer steps of this run."""
        self.settings = settings
        self.peak = peak
        self.max_steps = max_steps
        self.total_steps = total_schedule_steps(settings, max_steps)
        self.warmup_steps = warmup_schedule_steps(settings, max_steps)
        self._decay: Decay = SCHEDULES.get(settings.name)(settings, self.total_steps, self.warmup_steps)
        self.budget_s: float = 3600.0 * (getattr(settings, "until_hours", None) or 0.0)
        """Wall time at whose end the rate reaches its end, as `plan` decides; 0 if steps decide."""

    def plan(self, step: int, used_s: float) -> list[int]:
        """Return the steps at which a decay by wall time begins and ends, or none yet; TrainingError in the warmup."""
        position = self.settings.start_step + step
        is_early = used_s < (1.0 - getattr(self.settings, "decay_fraction", 0.0)) * self.budget_s
        if is_early or self._decay.share(position) < 1.0:  # which a decay by steps has begun
            return []
        if position < self.warmup_steps:
            text = f"{position} of {self.warmup_steps} steps of warmup fit before the decay"
            raise TrainingError(f"schedule.until_hours {self.budget_s / 3600:g}: {text}; shorten it or give more hours")
        left = max(1, int((self.budget_s - used_s) / used_s * step))
        return [step, min(step + left, self.max_steps, self.total_steps - self.settings.start_step)]

    def at(self, step: int, decay: Sequence[int] = ()) -> float:
        """Return the learning rate of the update after `step` completed updates; `decay` is what `plan` returned."""
        position = self.settings.start_step + step
        self._decay.planned = [self.settings.start_step + bound for bound in decay]
        if position < self.warmup_steps:
            rises = self.settings.warmup_shape == "linear"
            return self.peak * position / self.warmup_steps if rises else self.peak
        return self._decay.rate(position, self.peak)


class Decay:
    """Learning rate after the warmup. A subclass names its section and computes `share`, or `rate` itself."""

    section: ClassVar[type[ScheduleSection]]
    planned: Sequence[int] = ()
    """Schedule steps at which a decay by wall time begins and ends."""

    def __init__(self, settings: Any, total_steps: int, warmup_steps: int) -> None:
        """Take the section of the recipe, and its steps as they are resolved."""
        self.settings = settings
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps

    def rate(self, position: int, peak: float) -> float:
        """Return the learning rate at a step of the schedule, from warmup_steps on."""
        final = self.settings.final_learning_rate
        left = self.share(position) if position < self.total_steps else 0.0
        return float(final + (peak - final) * left)

    def share(self, position: int) -> float:
        """Return the part of the decay that remains, from 1 down to 0, at a step before total_steps."""
        raise NotImplementedError


class LinearSection(ScheduleSection):
    """Linear decay."""

    name: str = "linear"
    decay_from: Literal["warmup", "start"] = "warmup"
    """`warmup` starts the decay when the warmup ends (transformers, fairseq). `start` counts it from step 0, so the
    warmup ends a little below the peak (the code of BERT, GPT and NVIDIA's LAMB)."""


class Linear(Decay):
    """Decay in proportion to the steps."""

    section = LinearSection

    def share(self, position: int) -> float:
        return 1.0 - self._progress(position)

    def _progress(self, position: int) -> float:
        start = 0 if self.settings.decay_from == "start" else self.warmup_steps
        return (position - start) / (self.total_steps - start)


class PolynomialSection(LinearSection):
    """Decay as a power of the remaining steps."""

    name: str = "polynomial"
    power: PositiveFloat = 1.0
    """Exponent of the polynomial decay; 1 is linear."""


class Polynomial(Linear):
    """A power of the linear decay."""

    section = PolynomialSection

    def share(self, position: int) -> float:
        return float(super().share(position) ** self.settings.power)


class CosineSection(LinearSection):
    """Decay along half a cosine wave."""

    name: str = "cosine"


class Cosine(Linear):
    """Half a cosine wave."""

    section = CosineSection

    def share(self, position: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * self._progress(position)))


class InverseSqrtSection(ScheduleSection):
    """Decay with the inverse square root of the step (Vaswani 2017)."""

    decays_to_the_end: ClassVar = False

    name: str = "inverse_sqrt"


class InverseSqrt(Decay):
    """1 at the end of the warmup, then the inverse root of the step."""

    section = InverseSqrtSection

    def rate(self, position: int, peak: float) -> float:
        timescale = self.warmup_steps or INVERSE_SQRT_TIMESCALE_STEPS
        decayed = peak * math.sqrt(timescale / (position - self.warmup_steps + timescale))
        return float(max(self.settings.final_learning_rate, decayed))


class WarmupStableDecaySection(ScheduleSection):
    """Warmup-stable-decay: the peak, then a decay in the last steps."""

    name: str = "wsd"
    decay_fraction: Probability = 0.1
    """Fraction of total_steps, at the end, in which the learning rate decays."""
    decay_shape: Literal["linear", "one_minus_sqrt"] = "linear"
    """Shape of the decay; `one_minus_sqrt` falls as 1 - sqrt(progress) (Hägele 2024; ModernBERT)."""
    until_hours: PositiveFloat | None = None
    """Decay in the last decay_fraction of this wall time of the run, or of its phase, by the speed measured until then,
    and end it; training.max_steps is a bound. null: in the last steps."""

    def problems(self, total_steps: int, warmup_steps: int) -> Iterator[Problem]:
        if self.until_hours and self.decay_fraction == 1.0:
            text = "1 leaves no time to measure the speed by which schedule.until_hours plans the decay; lower it"
            yield Problem("schedule.decay_fraction", text, ("schedule.until_hours",))
        decay = round(self.decay_fraction * total_steps)
        if warmup_steps + decay > total_steps:
            text = (
                f"{self.decay_fraction:g}: {decay} steps of decay and {warmup_steps} of warmup exceed {total_steps}; "
                "shorten one"
            )
            involved = ("warmup_steps", "warmup_fraction", "name", "total_steps", "start_step")
            steps = tuple(f"schedule.{name}" for name in involved)
            yield Problem("schedule.decay_fraction", text, (*steps, "training.max_steps"))


class WarmupStableDecay(Decay):
    """The peak, then a decay to the end."""

    section = WarmupStableDecaySection

    def share(self, position: int) -> float:
        by_steps = self.total_steps - round(self.settings.decay_fraction * self.total_steps), self.total_steps
        begin, end = self.planned or by_steps
        share = min(1.0, (end - position) / (end - begin)) if end > begin else 1.0
        return share if self.settings.decay_shape == "linear" else 1.0 - math.sqrt(1.0 - share)


class Segment(Section):
    """A part of a schedule, which begins at the rate at which the one before it ends."""

    shape: Literal["warmup", "constant", "linear", "cosine", "one_minus_sqrt"]
    """A linear rise, no change, or the form of a decay."""
    steps: PositiveSteps | None = None
    """Steps; give this or share."""
    share: Probability | None = None
    """Steps as a share of total_steps, rounded down."""
    to: Probability | None = None
    """Rate at its end as a share of the peak; null: 1 after a warmup, 0 after a decay."""
    repeats: SmallInt = 1
    """Times in a row that it runs, each from the rate at which the first begins (restarts)."""

    def between(self, progress: float, begin: float, end: float) -> float:
        """Return the rate after a part of the segment, from 0 to 1, that runs from `begin` to `end`."""
        if self.shape == "warmup":
            return begin + (end - begin) * progress
        if self.shape == "cosine":
            return end + (begin - end) * 0.5 * (1.0 + math.cos(math.pi * progress))
        return end + (begin - end) * (1.0 - (math.sqrt(progress) if self.shape == "one_minus_sqrt" else progress))


class SegmentsSection(ScheduleSection):
    """Segments in a row, after the warmup if there is one; the rate stays at that of the last one's end."""

    decays_to_the_end: ClassVar = False

    name: str = "segments"
    segments: list[Segment] = []
    """The segments: `{shape: cosine, share: 0.3, to: 0.1, repeats: 3}`; a warmup at the beginning rises from 0."""

    @property
    def idle_settings(self) -> tuple[str, ...]:
        return ("final_learning_rate",)

    def runs(self, total_steps: int) -> Iterator[tuple[Segment, int, float, float]]:
        """Yield each segment as often as it repeats, its steps, and the shares of the peak at its begin and end."""
        begin = float(not self.segments or self.segments[0].shape != "warmup")
        for part in self.segments:
            steps = part.steps or int(round((part.share or 0.0) * total_steps, 6))
            end = float(part.shape == "warmup") if part.to is None else part.to
            end = begin if part.shape == "constant" else end
            yield from [(part, steps, begin, end)] * part.repeats
            begin = end

    def problems(self, total_steps: int, warmup_steps: int) -> Iterator[Problem]:
        found, left = [], total_steps - warmup_steps
        for part, steps, begin, end in self.runs(total_steps):
            left -= steps
            if (part.steps is None) == (part.share is None) or not steps:
                found.append(f"{part.shape} needs either steps or share, of at least one step")
            elif (begin - end) * (-1 if part.shape == "warmup" else 1) < 0:
                found.append(f"{part.shape} from {begin:g} to {end:g} of the peak: a warmup rises and a decay falls")
        if left < 0 or not self.segments:
            found.append(f"the segments have {total_steps - warmup_steps - left} of {total_steps - warmup_steps} steps")
        if found:
            yield Problem("schedule.segments", "; ".join(dict.fromkeys(found)), ("schedule.total_steps",))


class Segments(Decay):
    """Segments in a row."""

    section = SegmentsSection

    def rate(self, position: int, peak: float) -> float:
        start, end = self.warmup_steps, 1.0
        for part, steps, begin, end in self.settings.runs(self.total_steps):
            if position < start + steps:
                return float(part.between((position - start) / steps, begin * peak, end * peak))
            start += steps
        return end * peak


class ConstantSection(ScheduleSection):
    """The peak to the end."""

    decays_to_the_end: ClassVar = False

    name: str = "constant"

    @property
    def idle_settings(self) -> tuple[str, ...]:
        return ("final_learning_rate",)


class Constant(Decay):
    """The peak."""

    section = ConstantSection

    def rate(self, position: int, peak: float) -> float:
        return peak
