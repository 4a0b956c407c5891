"""Settings as plain data: the newest place of each, sections that merge, and values that replace."""

from __future__ import annotations

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.raw import RawRecipe, validate
from ctxlm_ds.recipe.yaml_source import read_yaml


def merged(*texts: str) -> RawRecipe:
    raw = RawRecipe()
    for number, text in enumerate(texts):
        raw.merge(read_yaml(text, f"{number}.yaml"), f"{number}.yaml")
    return raw


def test_sections_merge_and_lists_are_replaced() -> None:
    raw = merged("data: {train: [a, b], seq_length: 64}", "data: {train: [c]}")
    assert raw.data == {"data": {"train": ["c"], "seq_length": 64}}
    assert raw.origin(("data", "train", 0)) == raw.origin(("data", "train")) == "1.yaml:1"
    assert raw.origin(("data", "seq_length")) == "0.yaml:1" and raw.origin(("model", "name")) == ""


def test_every_problem_is_raised_with_its_place() -> None:
    raw = merged("name: x\ntraining: {max_steps: many}", "data: {seq_length: -1}")
    with pytest.raises(ConfigError) as error:
        validate(raw, "recipe x")
    said = str(error.value)
    assert said.startswith("recipe x: 2 problems") and "[0.yaml:2]" in said and "[1.yaml:1]" in said
