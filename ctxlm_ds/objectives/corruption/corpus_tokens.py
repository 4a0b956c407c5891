"""Random tokens in the proportions of the training text (SpanBERT: fairseq/data/masking.py draws one of its tokens).

The sample has runs of consecutive tokens at keyed places, so that a corpus on a network disk is read in some thousand
accesses. It depends on the seed and the datasets alone: every rank and every resume has the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ctxlm_ds.data.numba_random import hash_words
from ctxlm_ds.data.sample import Ids, Marks, Shares
from ctxlm_ds.errors import DataError

if TYPE_CHECKING:
    from ctxlm_ds.data.index.index import RowSource

SAMPLE_TOKENS = 1 << 20
RUN_TOKENS = 1 << 8
COUNTED_TOKENS = 1 << 26
COUNTED_RUN = 1 << 14
PURPOSE = "random_tokens"


def choice_weights(rows: RowSource, seed: int, is_special: Marks, smoothing: float) -> Shares:
    """Return [vocabulary] max(count, 1)^-smoothing of each token (train.py of DistilBERT's code, after XLM).

    Counts are those of all training documents, or of 2^26 of their tokens. Arguments and errors are those of
    sample_tokens.
    """
    tokens = sample_tokens(rows, seed, is_special, COUNTED_TOKENS, COUNTED_RUN)
    counts = np.bincount(tokens, minlength=len(is_special))
    return np.maximum(counts, 1).astype(np.float64) ** -smoothing


def sample_tokens(
    rows: RowSource, seed: int, is_special: Marks, most: int | None = None, run: int | None = None
) -> Ids:
    """Return tokens of the training documents, at most 2^20 or `most`, without special ones ([vocabulary] True).

    Each dataset counts by its tokens. A larger corpus is read in runs of `run` consecutive tokens, 2^8 by default.

    Raises:
        DataError: the documents have no text, or a token outside of the vocabulary.
    """
    most, run = most or SAMPLE_TOKENS, run or RUN_TOKENS
    pieces, sizes = [], []
    for index in rows.indexes:
        documents = index.dataset.arrays.documents[index.meta["dataset"]["documents"]]
        first, after = index.dataset.first_tokens(documents).tolist()
        pieces.append(index.dataset.tokens[first:after])
        sizes.append(after - first)
    total = sum(sizes)
    if total <= most:
        found = [np.asarray(piece, dtype=np.int64) for piece in pieces]
    else:
        words = hash_words(most // run, PURPOSE, seed)
        places = np.sort(words % np.uint64(total - run + 1)).astype(np.int64)
        bounds = np.cumsum(sizes)
        found = []
        for place in places.tolist():
            number = int(np.searchsorted(bounds, place, side="right"))
            start = place - int(bounds[number]) + sizes[number]
            found.append(np.asarray(pieces[number][start : start + run], dtype=np.int64))
    tokens = np.concatenate([np.empty(0, dtype=np.int64), *found])
    if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= len(is_special):
        names = ", ".join(index.dataset.prefix for index in rows.indexes)
        raise DataError(f"{names}: a token outside of the vocabulary of {len(is_special)}; run ctxlm inspect --verify")
    tokens = tokens[~is_special[tokens]]
    if len(tokens) == 0:
        raise DataError(
            "data.train has no text to draw tokens from; set objective.random_tokens to vocabulary and "
            "objective.count_smoothing to 0"
        )
    return tokens.astype(np.int32)
