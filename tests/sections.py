"""Sections of a recipe by the names of their family, objective and format."""

from __future__ import annotations

from typing import Any

from ctxlm_ds.recipe.choices import DATA, MODEL, OBJECTIVE, Choice


def model_section(**settings: Any) -> Any:
    """Make the section of `family` (bert if none is given)."""
    return _section(MODEL, settings)


def objective_section(**settings: Any) -> Any:
    """Make the section of `name` (masked_lm_nsp if none is given)."""
    return _section(OBJECTIVE, settings)


def data_section(**settings: Any) -> Any:
    """Make the section of `sample_format` (segment_pair if none is given)."""
    return _section(DATA, settings)


def _section(choice: Choice, settings: dict[str, Any]) -> Any:
    return choice.registry.get(choice.name(settings)).section.model_validate(settings)
