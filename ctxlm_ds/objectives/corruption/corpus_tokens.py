"""Random tokens in the proportions of the training text (SpanBERT: fairseq/data/masking.py draws one of its tokens).

The sample has runs of consecutive tokens at keyed places, so that a corpus on a network disk is read in some thousand
accesses. It depends on the seed and the datasets alone: every rank and every resume has the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.numba_random import hash_words
from ctxlm_ds.errors import DataError

if TYPE_CHECKING:
    from ctxlm_ds.data.index.index import RowSource

SAMPLE_TOKENS = 1 << 20
RUN_TOKENS = 1 << 8
PURPOSE = "random_tokens"


def sample_tokens(rows: RowSource, seed: int, is_special: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return up to 2^20 tokens of the training documents, special ones left out.

    Args:
        rows: the training rows; each dataset counts by its tokens.
        seed: seed of the run.
        is_special: [vocabulary].

    Raises:
        DataError: the documents have no text, or a token outside of the vocabulary.
    """
    pieces, sizes = [], []
    for index in rows.indexes:
        documents = index.dataset.document_indices[index.meta["dataset"]["documents"]]
        first, after = index.dataset.first_tokens(documents).tolist()
        pieces.append(index.dataset.tokens[first:after])
        sizes.append(after - first)
    total = sum(sizes)
    if total <= SAMPLE_TOKENS:
        found = [np.asarray(piece, dtype=np.int64) for piece in pieces]
    else:
        words = hash_words(SAMPLE_TOKENS // RUN_TOKENS, PURPOSE, seed)
        places = np.sort(words % np.uint64(total - RUN_TOKENS + 1)).astype(np.int64)
        bounds = np.cumsum(sizes)
        found = []
        for place in places.tolist():
            number = int(np.searchsorted(bounds, place, side="right"))
            start = place - int(bounds[number]) + sizes[number]
            found.append(np.asarray(pieces[number][start : start + RUN_TOKENS], dtype=np.int64))
    tokens = np.concatenate([np.empty(0, dtype=np.int64), *found])
    if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= len(is_special):
        names = ", ".join(index.dataset.prefix for index in rows.indexes)
        raise DataError(
            f"{names}: a token outside of the vocabulary of {len(is_special)}; run inspect_dataset.py --verify"
        )
    tokens = tokens[~is_special[tokens]]
    if len(tokens) == 0:
        raise DataError("data.train has no text to draw random tokens from; set objective.random_tokens to vocabulary")
    return tokens.astype(np.int32)
