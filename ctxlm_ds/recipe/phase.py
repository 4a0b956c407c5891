"""One phase of a run: its length, how it begins, and the settings that it changes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ctxlm_ds.recipe.sections import PositiveFloat, PositiveFraction, PositiveInt, PositiveSteps, Section
from ctxlm_ds.recipe.words import Words


class Phase(Section):
    """A part of a run with settings of its phase, which hold until a later phase changes them (docs/phases.md)."""

    LENGTHS: ClassVar[tuple[str, ...]] = ("steps", "tokens", "words", "hours", "share")
    """Settings of which each phase has exactly one."""

    steps: PositiveSteps | None = None
    """Length in optimizer steps."""
    tokens: PositiveInt | None = None
    """Length in positions of rows, padding included."""
    words: Words | None = None
    """Length in white-space words of the datasets: a number, or `100M`."""
    hours: PositiveFloat | None = None
    """Length in hours of training steps, over all restarts."""
    share: PositiveFraction | None = None
    """Length as a share of the run's tokens (positions); the shares add up to 1, and training.max_steps is the sum."""
    moments: Literal["keep", "recount", "fresh"] = "keep"
    """Optimizer's moments at its beginning: `keep` continues, `recount` keeps them and counts the updates of the bias
    correction from 0 (NVIDIA's LAMB), `fresh` starts from 0."""
    data: Literal["continue", "restart"] | None = None
    """Its rows: `continue` after the rows of the phase before, or `restart` at the first; null continues if the rows
    are the same."""
    set: Annotated[dict[str, Any], Field(max_length=100)] = {}
    """Settings that it changes, as sections of a recipe."""
