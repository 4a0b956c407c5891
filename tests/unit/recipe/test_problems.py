"""Problems in words: values as a person writes them, the nearest name, one error for all."""

from __future__ import annotations

import pickle

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.problems import (
    MAX_NAME_CHARACTERS,
    MAX_VALUE_CHARACTERS,
    Problem,
    ProblemsError,
    did_you_mean,
    nearest_name,
    raise_problems,
    show_value,
    text_problem,
)


def test_problems_are_one_error_with_their_places() -> None:
    raise_problems("recipe r.yaml", [])
    problems = [Problem("a.b", "is 1", where="r.yaml:3"), Problem("c", "is 2", ("a.b",))]
    with pytest.raises(ConfigError) as caught:
        raise_problems("recipe r.yaml", problems)
    assert str(caught.value) == "recipe r.yaml: 2 problems\n  a.b: is 1  [r.yaml:3]\n  c: is 2"
    with pytest.raises(ConfigError, match="^title: 1 problem\n"):
        raise_problems("title", problems[:1])


def test_ranks_may_send_the_error_to_each_other() -> None:
    with pytest.raises(ProblemsError) as caught:
        raise_problems("title", [Problem("a", "b")])
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, ProblemsError) and str(again) == str(caught.value)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("hiden_size", "hidden_size"), ("Hidden-Size", "hidden_size"), ("seq length", "seq_length"), ("xyz", None),
     ("hidden_size" * MAX_NAME_CHARACTERS, None)],
)  # fmt: skip
def test_the_nearest_name(name: str, nearest: str | None) -> None:
    names = ["hidden_size", "seq_length", "num_layers"]
    assert nearest_name(name, names) == nearest
    assert did_you_mean(name, names) == (f"; did you mean {nearest}?" if nearest else "")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("12", '"12"'), (None, "null"), (True, "true"), (1.5, "1.5"), ([1, 2], "[1, 2]"),
        ({}, "a section with no settings"), ({"a": 1, "b": 2}, "a section with a, b"),
    ],
)  # fmt: skip
def test_values_are_shown_as_they_are_written(value: object, shown: str) -> None:
    assert show_value(value) == shown


@pytest.mark.parametrize("value", ["x" * 10_000, list(range(10_000)), dict.fromkeys(map(str, range(1000)))])
def test_a_long_value_is_cut(value: object) -> None:
    assert len(show_value(value)) == MAX_VALUE_CHARACTERS and show_value(value).endswith("…")


@pytest.mark.parametrize("text", ["name", "a/b-c_d.yaml", "naïve 日本", "x" * 255, "/".join(["x" * 255] * 15)])
def test_names_and_paths(text: str) -> None:
    assert text_problem(text) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [("a\nb", r"a\nb"), ("\x7f", "control"), ("\ud800", "not UTF-8"), ("x" * 256, "255 bytes per name"),
     ("é" * 128, "255 bytes per name"), ("ab/" * 1366, "4,095 per path")],
)  # fmt: skip
def test_what_is_no_name_and_no_path(text: str, words: str) -> None:
    assert words in str(text_problem(text))
