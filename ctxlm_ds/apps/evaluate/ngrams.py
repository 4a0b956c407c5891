"""Cross entropy of held-out tokens under counts of the training text: unigrams, and an interpolated Kneser-Ney trigram.

Kneser & Ney 1995 as in Chen & Goodman 1999, section 3, with one discount D = n1 / (n1 + 2 n2) for each order.
Shape letters: t tokens, k different n-grams. An n-gram's key is its tokens as the digits of a number.
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
Shares = NDArray[np.float64]
MOST_IDS = 1 << 21
"""Keys of trigrams of so many ids fit 63 bits."""
FEW_DATA = 0.5
"""Discount of an order without n-grams that occur once."""


class Order(NamedTuple):
    """The counts of one order: how often each n-gram occurs or, below the highest order, after how many tokens."""

    keys: Keys
    """[k] ascending."""
    counts: NDArray[np.int64]
    """[k]"""
    discount: float

    @classmethod
    def of(cls, keys: Keys) -> Order:
        """Count keys [t]."""
        found, counts = np.unique(keys, return_counts=True)
        ones, twos = int((counts == 1).sum()), int((counts == 2).sum())
        return cls(found, counts, ones / (ones + 2 * twos) if ones else FEW_DATA)

    def probability(self, keys: Keys, lower: Shares, num_ids: int) -> Shares:
        """Return p(last token | tokens before) of n-grams [t]; `lower` [t] is that of the next lower order."""
        contexts, first, types = np.unique(self.keys // num_ids, return_index=True, return_counts=True)
        totals = np.add.reduceat(self.counts, first)
        place, known = _find(contexts, keys // num_ids)
        own, seen = _find(self.keys, keys)
        counts = np.where(seen, self.counts[own], 0)
        kept = np.maximum(counts - self.discount, 0.0) + self.discount * types[place] * lower
        return np.where(known, kept / totals[place], lower)


def _find(sorted_keys: Keys, wanted: Keys) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the place of each key (any place for a missing one), and whether it is there."""
    places = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    return places, sorted_keys[places] == wanted


def trigram_probabilities(training: Keys, held_out: Keys, num_ids: int) -> Shares:
    """Return p(token | two tokens before) of held_out[2:] under the counts of the training tokens.

    Raises:
        DataError: too few tokens, or too many ids.
    """
    if min(len(training), len(held_out)) < 3 or num_ids > MOST_IDS:
        raise DataError(f"trigrams need 3 tokens of at most {MOST_IDS:,} ids on both sides; give other datasets")
    text, read = training.astype(np.int64), held_out.astype(np.int64)
    base = num_ids
    third = Order.of((text[:-2] * base + text[1:-1]) * base + text[2:])
    second = Order.of(third.keys % base**2)
    first = Order.of(np.unique(text[:-1] * base + text[1:]) % base)
    u, v, w = read[:-2], read[1:-1], read[2:]
    share = first.probability(w, np.full(len(w), 1.0 / num_ids), num_ids)
    share = second.probability(v * base + w, share, num_ids)
    return third.probability((u * base + v) * base + w, share, num_ids)


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
