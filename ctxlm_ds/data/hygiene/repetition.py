"""How much a text repeats itself, in the measures of Gopher (Rae et al. 2021, arXiv:2112.11446, table A1).

In: a text. Out: the measure that is beyond its bound, in words, or None. A share is of the characters inside words.
Not here: what Gopher asks of words and symbols (quality.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.hygiene.words import Hashes, ngram_hashes, word_hashes
from ctxlm_ds.data.numba_random import compiled

MAX_REPEATED_LINES = 0.30
MAX_REPEATED_LINE_CHARACTERS = 0.20
MAX_TOP_NGRAM = {2: 0.20, 3: 0.18, 4: 0.16}
MAX_REPEATED_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


def repetition_reason(text: str) -> str | None:
    """What repeats too often: lines, paragraphs, one short n-gram, or long n-grams together."""
    for unit, separator in (("lines", "\n"), ("paragraphs", "\n\n")):
        reason = _repeated_pieces(unit, [piece.strip() for piece in text.split(separator)])
        if reason:
            return reason
    words, lengths = word_hashes(text)
    total = int(lengths.sum())
    if total == 0:
        return None
    for size, bound in MAX_TOP_NGRAM.items():
        if top_ngram_characters(ngram_hashes(words, size), lengths, size) > bound * total:
            return f"one {size}-gram holds over {bound:.0%} of the text"
    for size, bound in MAX_REPEATED_NGRAMS.items():
        if repeated_ngram_characters(ngram_hashes(words, size), lengths, size) > bound * total:
            return f"repeated {size}-grams hold over {bound:.0%} of the text"
    return None


def _repeated_pieces(unit: str, pieces: Sequence[str]) -> str | None:
    filled = [piece for piece in pieces if piece]
    seen: set[str] = set()
    repeated, repeated_characters = 0, 0
    for piece in filled:
        if piece in seen:
            repeated += 1
            repeated_characters += len(piece)
        seen.add(piece)
    if repeated > MAX_REPEATED_LINES * len(filled):
        return f"over {MAX_REPEATED_LINES:.0%} of the {unit} repeat another"
    if repeated_characters > MAX_REPEATED_LINE_CHARACTERS * sum(map(len, filled)):
        return f"repeated {unit} hold over {MAX_REPEATED_LINE_CHARACTERS:.0%} of the text"
    return None


def top_ngram_characters(grams: Hashes, lengths: NDArray[np.int32], size: int) -> int:
    """Characters in all copies of the n-gram that occurs most often (at least twice; the longest of several)."""
    return int(_top_ngram(grams, lengths, size))


def repeated_ngram_characters(grams: Hashes, lengths: NDArray[np.int32], size: int) -> int:
    """Characters in n-grams that occurred before, none counted twice."""
    return int(_repeated_ngrams(grams, lengths, size))


@compiled
def _slot(table: Hashes, key: np.uint64) -> int:
    """Where `key` stands in an open table, or the empty slot (0) where it would."""
    mask = len(table) - 1
    slot = int(key >> np.uint64(1)) & mask
    while table[slot] != 0 and table[slot] != key:
        slot = (slot + 1) & mask
    return slot


@compiled
def _empty_table(entries: int) -> Hashes:
    size = 16
    while size < 2 * entries:
        size *= 2
    return np.zeros(size, dtype=np.uint64)


@compiled
def _top_ngram(grams: Hashes, lengths: NDArray[np.int32], size: int) -> int:
    table = _empty_table(len(grams))
    counts = np.zeros(len(table), dtype=np.int64)
    for index in range(len(grams)):
        key = grams[index] | np.uint64(1)
        slot = _slot(table, key)
        table[slot] = key
        counts[slot] += 1
    most, characters = 2, 0
    for index in range(len(grams)):
        count = counts[_slot(table, grams[index] | np.uint64(1))]
        held = count * lengths[index : index + size].sum()
        if count > most or (count == most and held > characters):
            most, characters = count, held
    return characters


@compiled
def _repeated_ngrams(grams: Hashes, lengths: NDArray[np.int32], size: int) -> int:
    table = _empty_table(len(grams))
    characters, index = 0, 0
    while index < len(grams):
        key = grams[index] | np.uint64(1)
        slot = _slot(table, key)
        if table[slot] == key:
            characters += lengths[index : index + size].sum()
            index += size
        else:
            table[slot] = key
            index += 1
    return characters
