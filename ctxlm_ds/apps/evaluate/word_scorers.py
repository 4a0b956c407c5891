"""Scorers of sentences by counts of a training text: word frequencies, and a Kneser-Ney model of words.

A word is a run of letters and digits, with apostrophes and hyphens inside, or one other mark; case does not count.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ctxlm_ds.apps.evaluate.ngrams import NgramModel
from ctxlm_ds.apps.evaluate.pairs import Pair
from ctxlm_ds.apps.evaluate.scoring import SentenceScorer, TokenScores
from ctxlm_ds.data.preprocess.sentences import split_sentences

ORDER = 5
FEWEST_OCCURRENCES = 2
"""Of each word of a pair that is kept, as BabyLM 2023 filters its pairs."""
_WORD = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")
_BEGIN, _END = 0, 1


class TrainingWords:
    """The words of a training text by number, and how often each occurs; each sentence has a beginning and an end."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.numbers = {"<s>": _BEGIN, "</s>": _END}
        ids = array("q")
        for text in texts:
            for sentence in split_sentences(text):
                words = _WORD.findall(sentence.lower())
                ids.extend([_BEGIN, *(self.numbers.setdefault(word, len(self.numbers)) for word in words), _END])
        self.ids = np.array(ids, dtype=np.int64)
        self.counts = np.bincount(self.ids, minlength=len(self.numbers) + 1)  # the last is of unknown words

    def encode(self, sentence: str) -> list[int]:
        """Return the number of each word; unknown words have the one after the last."""
        return [self.numbers.get(word, len(self.numbers)) for word in _WORD.findall(sentence.lower())]

    def known_pairs(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Return the pairs whose words all occur at least FEWEST_OCCURRENCES times."""
        return [
            pair for pair in pairs if (self.counts[self.encode(f"{pair.good} {pair.bad}")] >= FEWEST_OCCURRENCES).all()
        ]


@dataclass
class WordScorer(SentenceScorer):
    """Log-probability of each word after up to four words of its sentence, or by its frequency alone (add one)."""

    ways: ClassVar[tuple[str, ...]] = (f"kneser-ney-{ORDER}", "frequencies")
    words: TrainingWords
    way: str = ways[0]
    definition: str = "babylm"

    def __post_init__(self) -> None:
        counts = self.words.counts + 1.0
        self._shares = counts / counts[2:].sum()
        if self.way == self.ways[0]:
            self._model = NgramModel(self.words.ids, len(counts), ORDER, _BEGIN, modified=True)

    def block(self, sentences: Sequence[str]) -> Iterator[TokenScores]:
        encoded = [[_BEGIN, *self.words.encode(sentence)] for sentence in sentences]
        ids = np.array([number for row in encoded for number in row])
        shares = self._model.probabilities(ids) if self.way == self.ways[0] else self._shares[ids]
        ends = np.cumsum([len(row) for row in encoded])
        for sentence, row, end in zip(sentences, encoded, ends.tolist(), strict=True):
            spans = [match.span() for match in _WORD.finditer(sentence)]
            yield TokenScores(np.log(shares[end - len(row) + 1 : end]), spans)
