"""Sentences scored by counts of words."""

from __future__ import annotations

import math

import pytest

from ctxlm_ds.apps.evaluate.pairs import Pair, outcomes_of, score_pairs
from ctxlm_ds.apps.evaluate.word_scorers import TrainingWords, WordScorer

TEXTS = ["The river is long. The rivers are long.", "A river isn't a sea; the sea is wide.\nRivers are wide."] * 3
FIVE, FREQUENCIES = WordScorer.ways


def pair(good: str, bad: str) -> Pair:
    return Pair(good, bad, "agreement", "agreement", "file:1")


def test_frequencies_are_those_of_the_text() -> None:
    words = TrainingWords(TEXTS)
    scorer = WordScorer(words, FREQUENCIES)
    text = " ".join(TEXTS).lower().replace(".", " .").replace(";", " ;").split()
    size = len(set(text)) + 1  # unknown words are one more
    (found,) = scorer.tokens(["The sea gleams."])
    expected = [math.log((text.count(word) + 1) / (len(text) + size)) for word in ("the", "sea", "gleams", ".")]
    assert found.values == pytest.approx(expected)
    assert [("The sea gleams."[start:stop]) for start, stop in found.spans] == ["The", "sea", "gleams", "."]


def test_the_words_before_decide() -> None:
    words = TrainingWords(TEXTS)
    pairs = [pair("The river is long.", "The river are long."), pair("The rivers are wide.", "The rivers is wide.")]
    by_order = outcomes_of(score_pairs(WordScorer(words), pairs))
    assert by_order.tolist() == [1.0, 1.0]
    same_words = [pair("the river is wide", "is wide the river")]
    assert outcomes_of(score_pairs(WordScorer(words, FREQUENCIES), same_words)).tolist() == [0.5]
    several = ["The river is long.", "A sea.", "Rivers are"]
    alone = [WordScorer(words).scores([one])[0] for one in several]
    assert WordScorer(words).scores(several) == pytest.approx(alone)


def test_pairs_of_rare_words_are_left_out() -> None:
    words = TrainingWords(["A cat sat. A cat isn't a dog.", "The dog SAT."])
    kept, rare = pair("A dog sat.", "A cat sat."), pair("A dog sat.", "The cat sat.")
    unknown, part = pair("A dog sat.", "A bird sat."), pair("A cat isn sat.", "A cat sat.")
    assert words.known_pairs([kept, rare, unknown, part]) == [kept]
