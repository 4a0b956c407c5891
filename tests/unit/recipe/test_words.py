"""Numbers of words in a recipe."""

from __future__ import annotations

from typing import Any

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import dump_config, load_config
from ctxlm_ds.recipe.words import STEPS_FOLLOW, parse_word_list, parse_words, short_words


@pytest.mark.parametrize(
    ("value", "words"),
    [(7, 7), ("7", 7), ("3K", 3000), ("100M", 10**8), ("2B", 2 * 10**9), ("1.5M", "1.5M"), (None, None)],
)
def test_units(value: Any, words: Any) -> None:
    assert parse_words(value) == words


def test_ranges_of_babylm() -> None:
    found = parse_word_list(["1M..10M by 1M", "20M..100M by 10M"])
    assert found == [*range(10**6, 10**7 + 1, 10**6), *range(2 * 10**7, 10**8 + 1, 10**7)]
    assert parse_word_list(["3K", 500, "1K..3K by 2K"]) == [500, 1000, 3000]
    with pytest.raises(ValueError, match="more than 1000 checkpoints"):
        parse_word_list(["1..1M by 1"])
    with pytest.raises(ValueError, match="the smaller number comes first"):
        parse_word_list(["10M..1M by 1M"])


@pytest.mark.parametrize(
    ("words", "name"), [(10**6, "1M"), (10**8, "100M"), (1500, "1500"), (3000, "3K"), (2 * 10**9, "2B")]
)
def test_names(words: int, name: str) -> None:
    assert short_words(words) == name
    assert parse_words(name) == words


def test_a_budget_in_words_gives_the_steps() -> None:
    config = load_config(
        "bert-laptop", ["training.max_words=2M", "training.max_steps=null", "checkpoint.at_words=[1M]"]
    )
    assert (config.training.max_words, config.training.max_steps) == (2_000_000, STEPS_FOLLOW)
    assert config.checkpoint.at_words == [1_000_000]
    assert "max_words: 2000000" in dump_config(config)


@pytest.mark.parametrize(
    "setting", ["training.max_words=10X", "checkpoint.at_words=[1M..2M]", "checkpoint.at_words=1M"]
)
def test_what_is_no_number_of_words_is_named(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        load_config("bert-laptop", [setting])
