"""Encode texts of which spans are given, and mark the tokens of each span.

A token belongs to a span if they share a character. So a span that begins or ends inside a token covers all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.sources.types import Spans
from ctxlm_ds.tokenizers.base import Tokenizer

SpannedIds = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.uint8]]
"""Ids of all sequences, [tokens]; tokens of each sequence; [tokens] 1 at a token that continues a span."""


def encode_spanned(
    tokenizer: Tokenizer, texts: Sequence[str], split: Sequence[Sequence[str]], spans: Sequence[Spans], prefix: str
) -> SpannedIds:
    """Encode the sequences of texts with the flags of their tokens.

    Args:
        tokenizer: the ids are those of its `encode_batch`.
        texts: [documents] the complete texts.
        split: [documents] the sequences of each text, in their order.
        spans: [documents] the spans of each text, in characters, in their order and without overlap.
        prefix: what stands before each sequence but a text's first and is not in the text.
    """
    sequences = [sequence for of_text in split for sequence in of_text]
    encodings = iter(tokenizer.encode_with_offsets(sequences))
    ids: list[int] = []
    lengths, flags = np.zeros(len(sequences), dtype=np.int64), [np.empty(0, dtype=np.uint8)]
    for text, of_text, given in zip(texts, split, spans, strict=True):
        bounds = np.array(given, dtype=np.int64).reshape(-1, 2)
        position = 0
        for number, sequence in enumerate(of_text):
            core = sequence[len(prefix) * (number > 0) :].strip()
            position = text.index(core, position)
            found, places = next(encodings)
            offsets = np.array(places, dtype=np.int64).reshape(-1, 2) + position - sequence.index(core)
            position += len(core)
            lengths[len(flags) - 1] = len(found)
            ids += found
            flags.append(continuations(offsets, bounds))
    return np.array(ids, dtype=np.int32), lengths, np.concatenate(flags)


def continuations(offsets: NDArray[np.int64], spans: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return [n] 1 for each token that belongs to the span of the token before it.

    Args:
        offsets: [n, 2] first character of each token, and the one after its last.
        spans: [m, 2] the same of each span, in their order and without overlap.
    """
    if not len(spans) or not len(offsets):
        return np.zeros(len(offsets), dtype=np.uint8)
    nearest = np.searchsorted(spans[:, 1], offsets[:, 0], side="right")
    begins = np.append(spans[:, 0], np.iinfo(np.int64).max)[nearest]
    owners = np.where(begins < offsets[:, 1], nearest, -1)
    flags = np.zeros(len(offsets), dtype=np.uint8)
    flags[1:] = (owners[1:] >= 0) & (owners[1:] == owners[:-1])
    return flags
