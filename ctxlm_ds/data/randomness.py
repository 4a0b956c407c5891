"""Counter-based random numbers: every draw belongs to a key, none to an order of execution.

In: a seed, a purpose (a distinct string a use) and integers such as epoch and sample. Out: Philox 4x64 streams (Salmon
2011, numpy's own) that are the same on every rank, in every loader worker and after a resume. Not here: torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Key = tuple[int, int, int]
WORD_MASK = (1 << 64) - 1
FLOAT_SCALE = 2.0**-53
FEISTEL_ROUNDS = 6
DRAWS_AT_ONCE = 64


def hash_words(count: int, *parts: int | str) -> NDArray[np.uint64]:
    """[count] 64-bit words of a hash over typed parts (so that 1 and "1" differ, and ("ab", "c") and ("a", "bc"))."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.shake_256(text.encode()).digest(8 * count)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def generator(seed: int, *key: int | str) -> np.random.Generator:
    """A generator of its own for (seed, key...), for draws that need numpy's distributions.

    Args:
        seed: the run's seed.
        key: the purpose, then whatever distinguishes this stream (epoch, document, ...).
    """
    return np.random.Generator(np.random.Philox(key=hash_words(2, seed, *key)))


class KeyedStreams:
    """One stream of 64-bit words for each triple of integers, all under the 128-bit key of (seed, purpose...).

    The triple fills the upper three words of Philox's 256-bit counter, so that streams never overlap (each is 2^66
    words long) and starting one costs two microseconds. Not thread-safe: `start` moves a shared position.
    """

    def __init__(self, seed: int, *purpose: int | str) -> None:
        self._bits = np.random.Philox(key=hash_words(2, seed, *purpose))
        self._state: Any = dict(self._bits.state)
        self._counter = np.zeros(4, dtype=np.uint64)
        self._state["state"] = {"counter": self._counter, "key": self._state["state"]["key"]}

    def start(self, key: Key) -> None:
        """Go to the beginning of the stream of `key` (three integers, taken modulo 2^64)."""
        self._counter[1] = key[0] & WORD_MASK
        self._counter[2] = key[1] & WORD_MASK
        self._counter[3] = key[2] & WORD_MASK
        self._bits.state = self._state

    def next_words(self, count: int) -> NDArray[np.uint64]:
        """[count] words from where the stream stands."""
        return self._bits.random_raw(count)

    def words(self, key: Key, count: int) -> NDArray[np.uint64]:
        """The first `count` words of the stream of `key`; a longer request begins with the same words."""
        self.start(key)
        return self._bits.random_raw(count)


class SampleDraws:
    """The random words of a batch of samples, each sample's from a stream of its own."""

    def __init__(self, streams: KeyedStreams, keys: Sequence[Key]) -> None:
        self._streams = streams
        self._keys = keys

    def words(self, count: int) -> NDArray[np.uint64]:
        """[samples, count]; row i depends on key i alone and is a prefix of what a larger count gives."""
        drawn = np.empty((len(self._keys), count), dtype=np.uint64)
        for row, key in enumerate(self._keys):
            drawn[row] = self._streams.words(key, count)
        return drawn


class ScalarDraws:
    """Single draws in the manner of Python's `random`, from one stream of a KeyedStreams."""

    def __init__(self, streams: KeyedStreams, key: Key) -> None:
        self._streams = streams
        self._drawn: list[float] = []
        streams.start(key)

    def random(self) -> float:
        """Uniform over [0, 1), 53 bits."""
        if not self._drawn:
            self._drawn = uniforms(self._streams.next_words(DRAWS_AT_ONCE)).tolist()
        return self._drawn.pop()

    def randint(self, low: int, high: int) -> int:
        """Uniform over low..high, both included."""
        return low + int(self.random() * (high - low + 1))


def uniforms(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Words as numbers in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * FLOAT_SCALE


class Permutation:
    """A pseudo-random order of 0..size-1 that needs no memory: any position is computed on its own.

    A Feistel network over the next even power of two, walked until it falls inside (Black and Rogaway 2002), keyed by
    (seed, key...). An array of the order would take 3 GB a process for bert-large's ten duplicates.
    """

    def __init__(self, size: int, seed: int, *key: int | str) -> None:
        self.size = size
        self._half_bits = max(1, (max(1, size - 1).bit_length() + 1) // 2)
        self._round_keys = hash_words(FEISTEL_ROUNDS, seed, *key, size)

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Elements at `positions` (any shape, each in 0..size-1)."""
        values = self._encrypt(np.asarray(positions).astype(np.uint64))
        outside = values >= self.size
        while outside.any():
            values[outside] = self._encrypt(values[outside])
            outside = values >= self.size
        return values.astype(np.int64)

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> half, values & mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        return (left << half) | right


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
