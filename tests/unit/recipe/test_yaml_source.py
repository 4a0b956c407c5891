"""YAML with the lines of its settings: twice written keys, anchors, and files that no recipe has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import load_config
from tests.unit.recipe.test_load import problems_of, write


def refusal(path: Path, text: str, *overrides: str) -> str:
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


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
        ("model: {hidden_size: 3\n", r"r\.yaml.*line 2.*not valid YAML"),
        ("- a\n- b\n", "a recipe is a section of settings"),
        ("model: !!python/object:os.system {}\n", "model.*is not allowed in a recipe"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("? [a, b]\n: 3\n", "a key must be text"),
        ("name: a # \x00", "not valid YAML"),
        ('name: "a\\0b"', "name: 'a.x00b': control characters"),
        ('name: "\\ud800"', "control characters and bytes that are not UTF-8"),
        ('"\\ud800": 1', "control characters"),
        ("name: \ud800", "cannot be read as UTF-8"),
        (f"name: {'x' * 300}", "too long for a file system"),
        (f"name: {'x' * 150}", "at most 100"),
        (f"data: {{train: [{'x' * 300}]}}", "too long for a file system"),
        ("model: " + "[" * 600 + "]" * 600, "nested deeper than 20 levels"),
        ("model: " + "[" * 30 + "]" * 30, "nested deeper than 20 levels"),
        (f"training: {{max_steps: {'9' * 309}}}", "expected a whole number from 1 to 1,000,000,000"),
        (f"training: {{max_steps: {'9' * 5000}}}", "a value cannot be read"),
        ("x" * 300_000, "too long for a recipe"),
    ],
)
def test_texts_that_no_recipe_has(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "r.yaml"
    message = refusal(path, text)
    assert re.search(words, message, re.DOTALL) and str(path) in message


@pytest.mark.timeout(30)
@pytest.mark.parametrize("line", ["a{n}: &a{n} [{above}]", "a{n}: &a{n} {{<<: [{above}]}}"])
def test_aliases_that_multiply_are_counted(tmp_path: Path, line: str) -> None:
    lines = [line.format(n=n, above=", ".join([f"*a{n - 1}"] * 9)) for n in range(1, 12)]
    assert "more than 20,000 values" in refusal(tmp_path / "r.yaml", "\n".join(["a0: &a0 {x: 1}", *lines]))
