"""Sections: unknown keys, values that do not change, bounded numbers, and both ways to write a source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import DataSection, ModelSection, ObjectiveSection, Section, TrainSource
from ctxlm_ds.registry import FAMILIES, FORMATS, OBJECTIVES

REGISTRIES = (FAMILIES, OBJECTIVES, FORMATS)
SECTIONS = [RunConfig, *(registry.get(name).section for registry in REGISTRIES for name in registry.shipped_names())]


class Plain(Section):
    share: float = 0.5


@pytest.mark.parametrize("values", [{"shares": 1.0}, {"share": float("nan")}, {"share": float("inf")}])
def test_unknown_keys_and_numbers_that_are_none_are_errors(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Plain(**values)


def test_values_never_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Plain().share = 1.0  # type: ignore[misc]


def numbers_of(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every number of a JSON schema."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield path, schema
        for key, value in schema.items():
            yield from numbers_of(value, f"{path}/{key}")
    elif isinstance(schema, list):
        for number, value in enumerate(schema):
            yield from numbers_of(value, f"{path}/{number}")


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_number_has_bounds(section: type[Section]) -> None:
    for path, schema in numbers_of(section.model_json_schema()):
        assert {"maximum", "exclusiveMaximum"} & schema.keys(), path
        assert {"minimum", "exclusiveMinimum"} & schema.keys(), path


def test_a_source_is_a_path_or_a_section() -> None:
    short = TrainSource.model_validate("data/a")
    assert (short.path, short.weight, short.epochs, short.name) == ("data/a", None, None, None)
    assert short.model_dump() == "data/a"
    long = TrainSource.model_validate({"path": "data/a", "weight": 2})
    assert long.model_dump() == {"path": "data/a", "weight": 2.0}
    assert TrainSource.model_validate(long.model_dump()) == long


def test_a_section_without_hooks_of_its_own_limits_nothing() -> None:
    class Model(ModelSection):
        num_layers: int = 3

    model, data, objective = Model(family="x"), DataSection(sample_format="y"), ObjectiveSection(name="z")
    assert (model.num_blocks, model.longest_sequence, model.width, model.drops) == (3, None, None, False)
    assert (data.shares_rows, data.sequences_per_row, data.passes) == (False, 1, 1)
    found = (model.problems(), model.row_problems(data), model.tensor_parallel_problems(7), data.problems(model),
             objective.problems(data))  # fmt: skip
    assert [list(problems) for problems in found] == [[]] * 5
