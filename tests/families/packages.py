"""What an installed package registers, for `pytest tests/families --package NAME`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FAMILIES, FORMATS, OBJECTIVES

families: list[str] | None = None
"""Families of the package of this session; None without --package."""
recipes: dict[str, tuple[str, dict[str, Any]]] = {}
"""For each objective of the package the name of a case -> its family, and the sections that the family's lacks."""


def choose(package: str) -> None:
    """Let the contract suite run for what a package registers; UsageError if that is nothing."""
    global families
    families, objectives = registered_by(package)
    recipes.update(recipe_of(objective, families) for objective in objectives)


def registered_by(package: str) -> tuple[list[str], list[str]]:
    """Families and objectives among a package's entry points."""
    try:
        points = distribution(package).entry_points
    except PackageNotFoundError:
        raise pytest.UsageError(f"--package {package}: no package of this name is installed here") from None
    found = [sorted(point.name for point in points.select(group=each.group)) for each in (FAMILIES, OBJECTIVES)]
    if not any(found):
        raise pytest.UsageError(f"--package {package}: it has no entry points {FAMILIES.group} or {OBJECTIVES.group}")
    return found[0], found[1]


def recipe_of(objective: str, own_families: Sequence[str]) -> tuple[str, tuple[str, dict[str, Any]]]:
    """The name of a case and its recipe: the first family and sample format that the objective goes with."""
    for family in [*own_families, *FAMILIES.shipped_names()]:
        tiny = FAMILIES.get(family).tiny()
        length = {"seq_length": tiny["data"]["seq_length"]}
        for data in [tiny["data"], *({"sample_format": name, **length} for name in FORMATS.names())]:
            sections = {"objective": {"name": objective}, "data": data}
            config = RunConfig.model_validate({"model": tiny["model"], **sections})
            try:
                check_config(config, None)
            except ConfigError:
                continue
            teacher = {"teacher": {"path": "teacher"}} if build_objective(config.objective).teacher_outputs else {}
            return f"{family}+{objective}", (family, sections | teacher)
    raise pytest.UsageError(f"--package: no family and sample format goes with the objective {objective}")
