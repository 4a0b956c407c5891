"""Keyed random orders: the same on every rank, in every loader worker and after a resume.

A key is a seed, a purpose (a distinct string for each use) and integers such as an epoch. Random words are in
numba_random.py.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

FEISTEL_ROUNDS = 6


def hash_words(count: int, *parts: int | str) -> NDArray[np.uint64]:
    """Return [count] 64-bit words of a hash over typed parts (1 and "1" differ, as do ("ab", "c") and ("a", "bc"))."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.shake_256(text.encode()).digest(8 * count)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


class Permutation:
    """A pseudo-random order of 0..size-1 that needs no memory: each position is computed by itself.

    A Feistel network over the next even power of two, walked until it falls inside (Black and Rogaway 2002), keyed by
    (seed, key...). An array of the order would take 3 GB per process for bert-large's ten duplicates.
    """

    def __init__(self, size: int, seed: int, *key: int | str) -> None:
        self.size = size
        self._half_bits = max(1, (max(1, size - 1).bit_length() + 1) // 2)
        self._round_keys = hash_words(FEISTEL_ROUNDS, seed, *key, size)

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the elements at `positions` (any shape, each in 0..size-1)."""
        from ctxlm_ds.data.numba_random import permute  # numba is imported late: planning imports this module

        values = np.array(positions, dtype=np.int64, order="C")
        permute(values.reshape(-1), self.size, self._half_bits, self._round_keys)
        return values
