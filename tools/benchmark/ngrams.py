"""Cross entropy of held-out tokens under unigrams and an interpolated Kneser-Ney trigram."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.apps.evaluate.word_scorers import Keys, NgramModel, Shares
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.errors import DataError
from ctxlm_ds.tokenizers.base import Tokenizer


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
