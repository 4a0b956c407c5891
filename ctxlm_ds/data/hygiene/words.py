"""Words of a text as 64-bit hashes, and their n-grams, the same in every process and run.

A word is a run of letters, digits and marks in any script, lower-cased. In scripts written without spaces (Chinese,
Japanese, Thai, Lao, Burmese, Khmer) each character is one. Punctuation does not count.
"""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.numba_random import compiled, mix

SEPARATOR, WORD, IDEOGRAPH = 0, 1, 2
_LAST_CLASSED = 0x3347F
_THAI_LAO, _BURMESE, _KHMER, _KANA = (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF)
_HAN = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, _LAST_CLASSED))
_WORD_PRIME = np.uint64(0x100000001B3)
_GRAM_BASE = np.uint64(0x9E3779B97F4A7C15)

Hashes = NDArray[np.uint64]


@cache
def character_classes() -> NDArray[np.uint8]:
    """Return SEPARATOR, WORD or IDEOGRAPH for each code point, [code points]; all beyond are separators."""
    classes = np.zeros(_LAST_CLASSED + 1, dtype=np.uint8)
    for code in range(0x20000):
        character = chr(code)
        if character.isalnum() or unicodedata.category(character)[0] == "M":
            classes[code] = WORD
    for first, last in (_THAI_LAO, _BURMESE, _KHMER, _KANA, *_HAN):
        block = classes[first : last + 1]
        block[(block == WORD) | (first >= 0x20000)] = IDEOGRAPH
    return classes


def word_hashes(text: str) -> tuple[Hashes, NDArray[np.int32]]:
    """Return hash and number of characters of each word of a text, both [words]."""
    normal = unicodedata.normalize("NFC", text).lower()
    codes = np.frombuffer(normal.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    hashes, lengths = _hash_words(codes, character_classes())
    return hashes, lengths


@compiled
def _hash_words(codes: NDArray[np.uint32], classes: NDArray[np.uint8]) -> tuple[Hashes, NDArray[np.int32]]:
    hashes = np.empty(len(codes), dtype=np.uint64)
    lengths = np.empty(len(codes), dtype=np.int32)
    count, length = 0, 0
    state = np.uint64(0)
    for code in codes:
        kind = classes[code] if code < len(classes) else np.uint8(SEPARATOR)
        if kind != WORD and length > 0:
            hashes[count], lengths[count] = mix(state), length
            count, length, state = count + 1, 0, np.uint64(0)
        if kind == SEPARATOR:
            continue
        state = (state ^ (np.uint64(code) + np.uint64(1))) * _WORD_PRIME
        if kind == IDEOGRAPH:
            hashes[count], lengths[count] = mix(state), 1
            count, state = count + 1, np.uint64(0)
        else:
            length += 1
    if length > 0:
        hashes[count], lengths[count] = mix(state), length
        count += 1
    return hashes[:count].copy(), lengths[:count].copy()


@compiled
def ngram_hashes(words: Hashes, size: int) -> Hashes:
    """Return the hash of each run of `size` words, in order, [max(0, words - size + 1)]."""
    grams = np.empty(max(0, len(words) - size + 1), dtype=np.uint64)
    highest = np.uint64(1)
    for _ in range(size):
        highest *= _GRAM_BASE
    state = np.uint64(0)
    for index in range(len(words)):
        state = state * _GRAM_BASE + words[index]
        if index >= size:
            state -= words[index - size] * highest
        if index >= size - 1:
            grams[index - size + 1] = mix(state)
    return grams
