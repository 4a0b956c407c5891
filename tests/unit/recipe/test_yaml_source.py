"""YAML with the lines of its settings: twice written keys, anchors, and files that are no YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import load_config
from tests.unit.recipe.test_load import problems_of, write


def test_keys_written_twice_are_refused_with_both_lines(tmp_path: Path) -> None:
    recipe = write(tmp_path / "r.yaml", "training:\n  seed: 1\n  max_steps: 5\n  seed: 2\n")
    assert problems_of(recipe) == [f"training.seed: written twice (first on line 2); keep one  [{recipe}:4]"]


def test_merge_keys_and_anchors_work_but_must_not_hold_themselves(tmp_path: Path) -> None:
    recipe = write(tmp_path / "r.yaml", "data:\n  validation:\n  - &one {name: a, path: p}\n  - {<<: *one, name: b}\n")
    assert [(source.name, source.path) for source in load_config(recipe).data.validation] == [("a", "p"), ("b", "p")]
    assert "contains itself" in problems_of(write(tmp_path / "loop.yaml", "data: {train: &x [*x]}\n"))[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {hidden_size: 3\n", ["line 2", "not valid YAML"]),
        ("- a\n- b\n", ["a recipe is a section of settings"]),
        ("model: !!python/object:os.system {}\n", ["model", "is not allowed in a recipe"]),
        ("a: 1\n---\nb: 2\n", ["not valid YAML"]),
        ("? [a, b]\n: 3\n", ["a key must be text"]),
    ],
)
def test_broken_files(tmp_path: Path, text: str, words: list[str]) -> None:
    recipe = write(tmp_path / "r.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(recipe)
    for word in (*words, str(recipe)):
        assert word in str(caught.value)


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(ConfigError, match="cannot be read as UTF-8"):
        load_config(tmp_path / "r.yaml")
