"""Senses of a word: occurrences found, groups that a contextual source separates, neighbours, the picture, refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.apps.downstream.features.choice import LayerChoice
from ctxlm_ds.apps.downstream.features.senses import draw, find_occurrences, find_senses, static_neighbours
from ctxlm_ds.apps.downstream.features.sources import FeatureSource
from ctxlm_ds.apps.downstream.features.static import StaticVectors
from ctxlm_ds.errors import ConfigError, DataError

MONEY, RIVER = ["the", "bank", "lends", "money"], ["a", "muddy", "Bank", "of", "water"]
SENTENCES = [MONEY, ["no", "such", "word"], RIVER, [*RIVER, "bank"], MONEY]
TOPICS = {"money": 0, "lends": 0, "muddy": 1, "water": 1}
STATIC = StaticVectors(
    {"bank": 0, "money": 1, "water": 2, "the": 3},
    np.array([[1, 1, 0], [1, 0.9, 0], [0.6, 1, 0], [0, 0, 1]], dtype=np.float32),
)


class Contextual(FeatureSource):
    """A word's vector has the topic of its sentence."""

    def __init__(self) -> None:
        super().__init__("contextual", 1, 3)

    def vectors(self, sentences: Sequence[Sequence[str]]) -> Iterator[Any]:
        for words in sentences:
            topic = max(TOPICS.get(word, -1) for word in words)
            found = np.zeros((1, len(words), 3), dtype=np.float32)
            found[0, :, topic] = 1
            found[0, [word not in TOPICS and word.lower() != "bank" for word in words], 2] = 5
            yield found


def test_groups_have_the_neighbours_of_their_topic() -> None:
    occurrences = find_occurrences(SENTENCES, "bank", 10)
    assert [(one.words, one.place) for one in occurrences] == [
        (tuple(MONEY), 1), (tuple(RIVER), 2), ((*RIVER, "bank"), 2), (tuple(MONEY), 1)
    ]  # fmt: skip
    assert occurrences[1].context == "a muddy Bank of water"
    found = find_senses(occurrences, Contextual(), LayerChoice.parse("-1"), 2, 2)
    by_member = {tuple(sense.occurrences): set(sense.neighbours) for sense in found.senses}
    assert by_member == {(0, 3): {"money", "lends"}, (1, 2): {"muddy", "water"}}
    around = static_neighbours(STATIC, "Bank", 2)
    assert around == ["money", "water"]
    assert draw(found, STATIC, ["Bank", *around], "contextual").startswith(b"\x89PNG")


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(DataError, match="--word word: 1 sentences of the text have it"):
        find_occurrences(SENTENCES, "word", 10)
    with pytest.raises(ConfigError, match="one word without spaces"):
        find_occurrences(SENTENCES, "a bank", 10)
    with pytest.raises(DataError, match="the file of static vectors does not have it"):
        static_neighbours(STATIC, "muddy", 2)
