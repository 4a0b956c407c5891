"""Sections of a recipe by the names of their family, objective and format, and recipes with changed settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctxlm_ds.recipe.choices import DATA, MODEL, OBJECTIVE, Choice
from ctxlm_ds.recipe.schema import RunConfig


def model_section(**settings: Any) -> Any:
    """Make the section of `family` (bert if none is given)."""
    return _section(MODEL, settings)


def objective_section(**settings: Any) -> Any:
    """Make the section of `name` (masked_lm_nsp if none is given)."""
    return _section(OBJECTIVE, settings)


def data_section(**settings: Any) -> Any:
    """Make the section of `sample_format` (segment_pair if none is given)."""
    return _section(DATA, settings)


def changed_config(sections: Mapping[str, Mapping[str, Any]], changes: Mapping[str, Any]) -> RunConfig:
    """Build a recipe from sections, with changes by path (`data.seq_length`)."""
    settings: dict[str, Any] = {section: dict(values) for section, values in sections.items()}
    for path, value in changes.items():
        section, name = path.split(".")
        settings.setdefault(section, {})[name] = value
    return RunConfig.model_validate(settings)


def _section(choice: Choice, settings: dict[str, Any]) -> Any:
    return choice.registry.get(choice.name(settings)).section.model_validate(settings)
