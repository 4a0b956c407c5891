"""Interpolated Kneser-Ney models, and the cross entropy of held-out tokens under unigrams and a trigram.

Kneser & Ney 1995 as in Chen & Goodman 1999, section 3, with one discount D = n1 / (n1 + 2 n2) for each order, or three.
Shape letters: t tokens, k different n-grams.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.errors import DataError
from ctxlm_ds.tokenizers.base import Tokenizer

Keys = NDArray[np.int64]
Counts = NDArray[np.int64]
Shares = NDArray[np.float64]
FEW_DATA = 0.5
"""Discount of an order without n-grams that occur once."""


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


def trigram_probabilities(training: Keys, held_out: Keys, num_ids: int) -> Shares:
    """Return p(token | two tokens before) of held_out[2:] under the counts of the training tokens.

    Raises:
        DataError: too few tokens.
    """
    if min(len(training), len(held_out)) < 3:
        raise DataError("trigrams need 3 tokens on both sides; give other datasets")
    return NgramModel(training.astype(np.int64), num_ids, 3).probabilities(held_out.astype(np.int64))[2:]


def compare_ngrams(training: Path, held_out: Path, words_of: Tokenizer | None = None) -> list[str]:
    """Return lines with loss (nats per token) and perplexity of unigrams and trigrams on a held-out dataset.

    With the tokenizer `words_of` they predict what objective bidirectional_lm predicts, in each direction: a word
    outside of the softmax is <UNK>, and each sequence has an end.
    """
    datasets = IndexedDataset(training), IndexedDataset(held_out)
    if words_of is None:
        return _compare(*(np.asarray(dataset.tokens) for dataset in datasets))
    sides = [[marked_words(dataset, words_of, backward) for dataset in datasets] for backward in (False, True)]
    (sizes, *forward), (_, *backward) = (_compare(*side) for side in sides)
    return [sizes, *(f"forward {line}" for line in forward), *(f"backward {line}" for line in backward)]


def marked_words(dataset: IndexedDataset, tokenizer: Tokenizer, backward: bool) -> NDArray[np.int64]:
    """Return the words that a model predicts: each sequence and its end, or all backward, each with its beginning."""
    lengths = dataset.lengths(0, len(dataset))
    starts = np.cumsum(lengths) - lengths
    words = np.asarray(dataset.tokens, dtype=np.int64)
    words = np.where(words < tokenizer.output_size, words, tokenizer.unk_id)
    if backward:
        return np.insert(words, starts[lengths > 0], tokenizer.cls_id)[::-1]
    return np.insert(words, (starts + lengths)[lengths > 0], tokenizer.sep_id)


def _compare(text: Keys, read: Keys) -> list[str]:
    num_ids = int(max(text.max(), read.max())) + 1
    counts = np.bincount(text, minlength=num_ids) + 1.0
    losses = {
        "unigram (add one)": -np.log(counts / counts.sum())[read].mean(),
        "trigram (Kneser-Ney)": -np.log(trigram_probabilities(text, read, num_ids)).mean(),
    }
    sizes = f"{len(text):,} tokens of training text, {len(read):,} held out, {num_ids:,} ids"
    return [sizes, *(f"{name}: {loss:.4f} nats, perplexity {np.exp(loss):.1f}" for name, loss in losses.items())]
