"""Scorers of sentences by counts of a training text: word frequencies, and an interpolated Kneser-Ney model of words.

A word is a run of letters and digits, with apostrophes and hyphens inside, or one other mark; case does not count.
Kneser & Ney 1995 as in Chen & Goodman 1999, section 3, with one discount D = n1 / (n1 + 2 n2) for each order, or three.
Shape letters: t tokens, k different n-grams.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.apps.evaluate.pairs import Pair
from ctxlm_ds.apps.evaluate.scorers import SentenceScorer, TokenScores
from ctxlm_ds.data.preprocess.sentences import split_sentences

Keys = NDArray[np.int64]
Counts = NDArray[np.int64]
Shares = NDArray[np.float64]
FEW_DATA = 0.5
"""Discount of an order without n-grams that occur once."""
ORDER = 5
FEWEST_OCCURRENCES = 2
"""Of each word of a pair that is kept, as BabyLM 2023 filters its pairs."""
_WORD = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")
_BEGIN, _END = 0, 1


class Order(NamedTuple):
    """The n-grams of one order and what is left of their counts."""

    keys: Keys
    """[k] ascending: place of the n-gram without its last token among those of the lower order, times the number of
    ids, plus the last token."""
    shares: Shares
    """[k] (count - discount) / count of the context."""
    left: Shares
    """[contexts] share of the discounts, which the lower order gets; 1 for a context without a next token."""


class NgramModel:
    """An interpolated Kneser-Ney model of a text [t] of ids below `num_ids`.

    With `begin`, the id that begins each sentence, no n-gram crosses into another sentence, `begin` is not predicted,
    and n-grams that start with it have their own counts in each order (Heafield 2011, section 3). `modified` takes
    three discounts for each order (Chen & Goodman 1999, equation 26), if n-grams of 1 to 4 occurrences exist.
    """

    def __init__(self, text: Keys, num_ids: int, order: int, begin: int = -1, modified: bool = False) -> None:
        self.num_ids, self.lowest = num_ids, 1.0 / (num_ids - (begin >= 0))
        self._orders: list[Order] = []
        positions = np.arange(len(text))
        starts = np.maximum.accumulate(np.where(text == begin, positions, 0))
        below: tuple[Keys, Counts, Counts, Keys] | None = None  # keys, occurrences, places in the text, n-gram at each
        for n in range(1, order + 1):
            at = positions[positions - starts >= n - 1]
            keys = text[at] if below is None else below[3][at - 1] * num_ids + text[at]
            found, first, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
            if below is not None:
                after = np.bincount(below[3][at[first]], minlength=len(below[0]))
                begins = (text[np.maximum(below[2] - n + 2, 0)] == begin) & (n > 2)
                self._add(below[0], np.where(begins, below[1], after), modified)
            own = np.full(len(text), -1)
            own[at] = inverse
            below = found, counts, at[first], own
        assert below is not None
        self._add(*below[:2], modified)

    def _add(self, keys: Keys, counts: Counts, modified: bool) -> None:
        contexts, size = keys // self.num_ids, len(self._orders[-1].keys) if self._orders else 1
        discounts = _discounts(counts, modified)[np.minimum(counts, 3)]
        totals = np.bincount(contexts, counts, size)
        taken = np.bincount(contexts, discounts, size)
        left = np.where(totals > 0, taken / np.maximum(totals, 1), 1.0)
        self._orders.append(Order(keys, (counts - discounts) / np.maximum(totals, 1)[contexts], left))

    def probabilities(self, text: Keys) -> Shares:
        """Return p(token | tokens before) for each of `text` [t]; its text may lack some ids."""
        share, contexts = np.full(len(text), self.lowest), np.zeros(len(text), dtype=np.int64)
        for order in self._orders:
            keys = contexts * self.num_ids + text
            places = np.minimum(np.searchsorted(order.keys, keys), len(order.keys) - 1)
            seen = (order.keys[places] == keys) & (contexts >= 0)
            mixed = np.where(seen, order.shares[places], 0.0) + order.left[np.maximum(contexts, 0)] * share
            share = np.where(contexts >= 0, mixed, share)
            contexts = np.concatenate([[-1], np.where(seen, places, -1)[:-1]])
        return share


def _discounts(counts: Counts, modified: bool) -> Shares:
    """Return what is taken from counts of 0, 1, 2, and 3 or more."""
    ones, twos, threes, fours = (int((counts == number).sum()) for number in (1, 2, 3, 4))
    single = ones / (ones + 2 * twos) if ones else FEW_DATA
    if not modified or min(ones, twos, threes, fours) == 0:
        return np.array([0.0, single, single, single])
    ratios = (2 * twos / ones, 3 * threes / twos, 4 * fours / threes)
    return np.array([0.0, *(max(0.0, number - single * ratio) for number, ratio in enumerate(ratios, 1))])


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
