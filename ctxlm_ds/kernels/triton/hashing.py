"""The keyed hash of kernels/dropout.py inside a kernel: equal bits for each element's place."""

from __future__ import annotations

import triton
import triton.language as tl

from ctxlm_ds.kernels import dropout

GAMMA = tl.constexpr(dropout.GAMMA)
MIX_1 = tl.constexpr(dropout.MIX_1)
MIX_2 = tl.constexpr(dropout.MIX_2)


@triton.jit
def hash_words(words, key):
    """Return splitmix64 of uint64 words and a key."""
    return mix((words + 1) * GAMMA + key)


@triton.jit
def mix(z):
    """Return the hash of a word's state, (word + 1) GAMMA + key."""
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def keeps(places, key, threshold):
    """Return whether the elements at int64 places are kept.

    Each element hashes its word of four lanes. The compiler merges the four equal hashes of neighbours in one thread.
    """
    bits = hash_words((places // 4).to(tl.uint64), key.to(tl.uint64)) >> ((places % 4) * 16).to(tl.uint64)
    # A lane counts as a signed number: its highest bit is turned.
    return ((bits & 0xFFFF).to(tl.int32) ^ 0x8000) >= threshold
