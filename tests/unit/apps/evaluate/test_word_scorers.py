"""Sentences scored by counts of words."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from ctxlm_ds.apps.evaluate.pairs import Pair, outcomes_of, score_pairs
from ctxlm_ds.apps.evaluate.word_scorers import NgramModel, TrainingWords, WordScorer

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


class ByDefinition:
    """Kneser-Ney over sentences, one n-gram at a time (Chen & Goodman 1999; Heafield 2011, section 3)."""

    def __init__(
        self, sentences: list[list[int]], order: int, num_predicted: int, begin: int = 0, modified: bool = True
    ) -> None:
        grams = [
            Counter(tuple(one[at : at + n]) for one in sentences for at in range(len(one) - n + 1))
            for n in range(1, order + 1)
        ]
        self.num_predicted, self.modified, self.counts = num_predicted, modified, []
        for n, found in enumerate(grams, 1):
            after = Counter(more[1:] for more in grams[n]) if n < order else found
            own = {gram: count if n > 1 and gram[0] == begin else after[gram] for gram, count in found.items()}
            self.counts.append(own)

    def discount(self, n: int, count: int) -> float:
        number = [list(self.counts[n - 1].values()).count(k) for k in range(5)]
        single = number[1] / (number[1] + 2 * number[2]) if number[1] else 0.5
        k = min(count, 3)
        if not self.modified:
            return single if k else 0.0
        return 0.0 if k == 0 else max(0.0, k - (k + 1) * single * number[k + 1] / number[k])

    def probability(self, context: tuple[int, ...], word: int) -> float:
        n = len(context) + 1
        lower = self.probability(context[1:], word) if context else 1 / self.num_predicted
        after = {gram: count for gram, count in self.counts[n - 1].items() if gram[:-1] == context}
        total = sum(after.values())
        if not total:
            return lower
        count = after.get((*context, word), 0)
        left = sum(self.discount(n, each) for each in after.values())
        return (count - self.discount(n, count)) / total + left / total * lower


def test_modified_probabilities_of_sentences_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(3)
    sentences = [[0, *np.minimum(rng.geometric(0.1, rng.integers(1, 9)) + 1, 49).tolist(), 1] for _ in range(150)]
    expected = ByDefinition(sentences, 3, num_predicted=50)  # 1 to 49 and an unknown word
    model = NgramModel(np.array(sum(sentences, [])), 51, 3, begin=0, modified=True)
    read = [*sentences[:20], *([0, *row, 1] for row in rng.integers(2, 51, size=(20, 6)).tolist())]
    found = model.probabilities(np.array(sum(read, [])))
    at = 0
    for sentence in read:
        for place in range(1, len(sentence)):
            context = tuple(sentence[max(0, place - 2) : place])
            assert found[at + place] == pytest.approx(expected.probability(context, sentence[place]))
        at += len(sentence)
    every = np.array([[0, first, last] for first in (2, 50) for last in range(1, 51)]).ravel()
    sums = model.probabilities(every).reshape(2, 50, 3)[:, :, 2].sum(axis=1)
    assert sums == pytest.approx([1.0, 1.0])
