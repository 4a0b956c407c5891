"""Base class of every section of a recipe, and the number types of settings. Every number has an upper bound."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1, le=10**15)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**15)]
PositiveSteps = Annotated[int, Field(ge=1, le=10**9)]
"""Optimizer steps, or rows of a step."""
NonNegativeSteps = Annotated[int, Field(ge=0, le=10**9)]
Width = Annotated[int, Field(ge=1, le=2**20)]
"""One dimension of a tensor."""
SmallInt = Annotated[int, Field(ge=1, le=10_000)]
"""Number of layers, ranks, passes, and other things that a person can count."""
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0, le=1e9)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, le=1e9)]


class Section(BaseModel):
    """One section of a recipe: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
