"""Keyed random words inside compiled loops (numba), counter-based at a nanosecond per word, and keyed orders.

A stream belongs to (seed, purpose) and three integers. Its word j is splitmix64's output function of state + j·gamma
(Steele 2014), so any word is computed by itself, in any order, on any rank. The same function folds the three integers
into the state, one at a time.

Compiled code uses only `@compiled` and `@inlined` (cached on disk, no GIL), and never numba's threads, which do not
survive a fork: parallel loops are threads of the caller, each over a range.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from numpy.typing import NDArray

GAMMA = np.uint64(0x9E3779B97F4A7C15)
FLOAT_SCALE = 2.0**-53
FEISTEL_ROUNDS = 6


@lru_cache
def _cache_folder() -> str:
    """Return the folder of compiled code, one for each state of the package's sources.

    numba's check sees changes of a function's file only, not of the functions that it calls in other files.
    """
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in ("data", "kernels", "objectives"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    home = package / "__pycache__"
    if not os.access(home if home.exists() else package, os.W_OK):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ctxlm_ds"
    return str(home / f"compiled-{digest.hexdigest()[:16]}")


def compiled(function: Any, **options: Any) -> Any:
    """Compile a function; other users of numba in this process keep their cache folder.

    Of the processes of a host one compiles and the others load what it stored: the ranks of a first run start together.
    """
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = before or _cache_folder()
    try:
        loop = numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
    finally:
        numba.config.CACHE_DIR = before
    compile_here = loop.compile
    name = hashlib.sha256(f"{loop.stats.cache_path}/{function.__qualname__}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"ctxlm-{os.getuid()}")  # locks of a shared file system are not always obeyed

    def compile_once(signature: Any) -> Any:
        # Numba's lock comes first: a thread that waits for another process lets no thread wait that it could block.
        folder.mkdir(mode=0o700, exist_ok=True)
        place = folder if folder.lstat().st_uid == os.getuid() else Path(tempfile.mkdtemp())  # another user's: no waits
        with global_compiler_lock, open(place / name, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                return compile_here(signature)
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a process forked meanwhile has it open

    loop.compile = compile_once
    return loop


inlined = partial(compiled, inline="always")


def hash_words(count: int, *parts: int | str) -> NDArray[np.uint64]:
    """Return [count] 64-bit words of a hash over typed parts (1 and "1" differ, as do ("ab", "c") and ("a", "bc"))."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return np.frombuffer(hashlib.shake_256(text.encode()).digest(8 * count), dtype="<u8").astype(np.uint64)


def stream_key(seed: int, *purpose: int | str) -> np.uint64:
    """Return the key of all streams of (seed, purpose...)."""
    return np.uint64(hash_words(1, seed, *purpose)[0])


@inlined
def mix(word: np.uint64) -> np.uint64:
    """Return splitmix64's finalizer of a word, a bijection of 64 bits."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@inlined
def stream(key: np.uint64, first: int, second: int, third: int) -> np.uint64:
    """Return the state of the stream of three integers under a key."""
    state = mix(key + np.uint64(first) * GAMMA + GAMMA)
    state = mix(state ^ (np.uint64(second) * GAMMA + np.uint64(1)))
    return mix(state ^ (np.uint64(third) * GAMMA + np.uint64(2)))


@inlined
def word_at(state: np.uint64, number: int) -> np.uint64:
    """Return word `number` (from 0) of a stream."""
    return mix(state + (np.uint64(number) + np.uint64(1)) * GAMMA)


@inlined
def uniform(word: np.uint64) -> float:
    """Return a word as a number in [0, 1), 53 bits."""
    return float(word >> np.uint64(11)) * FLOAT_SCALE


@inlined
def below(word: np.uint64, bound: int) -> np.int64:
    """Return a word as an integer in 0..bound-1, off uniform by at most bound / 2^32, above 2^32 by bound / 2^53."""
    if bound > 1 << 32:
        return min(np.int64(uniform(word) * bound), np.int64(bound - 1))
    return np.int64(((word >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32))


@inlined
def put(into: Any, values: Any) -> None:
    """Copy values [n] to the beginning of an array; numba compiles an assignment to a slice for three seconds."""
    for place, value in enumerate(values):
        into[place] = value


@compiled
def permute(values: Any, size: int, half_bits: int, round_keys: Any) -> None:
    """Replace each value, 0..size-1, by its image under a Feistel network (Permutation)."""
    half = np.uint64(half_bits)
    mask = (np.uint64(1) << half) - np.uint64(1)
    for position in range(len(values)):
        value = np.uint64(values[position])
        while True:
            left, right = value >> half, value & mask
            for key in round_keys:
                left, right = right, left ^ (mix(right + key) & mask)
            value = (left << half) | right
            if value < np.uint64(size):
                break
        values[position] = value


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
        values = np.array(positions, dtype=np.int64, order="C")
        permute(values.reshape(-1), self.size, self._half_bits, self._round_keys)
        return values
