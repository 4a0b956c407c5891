"""Baselines of held-out text: tokens per word, for a perplexity per word, and the unigram distribution."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.objectives.base import LossTerm
from ctxlm_ds.tokenizers.word_counts import WordCounts


def tokens_per_word(batches: Iterable[Batch], term: LossTerm, counts: WordCounts) -> float | None:
    """Return predicted tokens per word that begins among them; None without a word.

    Args:
        batches: all held-out rows; the label at a position is the token after its input.
        term: of the next tokens.
        counts: of the vocabulary.
    """
    tokens = words = 0
    for batch in batches:
        labels, inputs = (batch.fields[name].numpy() for name in (term.labels[0], "input_ids"))
        predicted = labels != IGNORE_LABEL
        tokens += int(predicted.sum())
        words += counts.count(inputs[predicted], labels[predicted])
    return tokens / words if words else None


def unigram_figures(train_prefix: Path, heldout_prefix: Path) -> tuple[float, float]:
    """Return the loss of the unigram distribution, and how often its most frequent token is right."""
    probabilities, tokens = unigram(train_prefix), IndexedDataset(heldout_prefix).tokens
    return unigram_loss(train_prefix, heldout_prefix), float((tokens == probabilities.argmax()).mean())


def unigram_loss(train_prefix: Path, heldout_prefix: Path) -> float:
    """Return the cross entropy in nats of held-out tokens under the (add-one) unigram distribution of the training."""
    heldout = IndexedDataset(heldout_prefix).tokens
    return float(-np.log(unigram(train_prefix, int(heldout.max()) + 1))[heldout].mean())


def unigram(train_prefix: Path, least_size: int = 0) -> NDArray[np.float64]:
    """Return the (add-one) frequency of each token in the training text."""
    counts = np.bincount(IndexedDataset(train_prefix).tokens, minlength=least_size) + 1.0
    return counts / counts.sum()
