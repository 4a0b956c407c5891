"""Distinct words drawn from the log-uniform distribution by key, as TensorFlow's log_uniform_candidate_sampler draws.

Word c of a vocabulary sorted by frequency has the probability log((c + 2) / (c + 1)) / log(v + 1). Words are drawn
until `count` of them differ, and the number of tries gives how often each word was expected (range_sampler.cc of
TensorFlow: LogUniformSampler, and ExpectedCountHelper with `unique`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctxlm_ds.data.numba_random import compiled, uniform, word_at


class Candidates(NamedTuple):
    """Distinct words in ascending order."""

    words: NDArray[np.int64]
    """[count]"""
    tries: int
    """Words drawn until so many differed."""


def draw_candidates(key: np.uint64, count: int, vocab_size: int) -> Candidates:
    """Draw `count` distinct words of 0..vocab_size-1, at most vocab_size, always the same ones for a key."""
    words = np.empty(count, dtype=np.int64)
    tries = _draw(np.uint64(key), math.log1p(vocab_size), words, np.zeros(vocab_size, dtype=np.bool_))
    words.sort()
    return Candidates(words, int(tries))


def log_expected_counts(words: Tensor, candidates: Candidates, vocab_size: int) -> Tensor:
    """Return the fp32 logarithm of how often `words` (int, any shape) were expected among the candidates."""
    probability = (1.0 / (words.double() + 1.0)).log1p() / math.log1p(vocab_size)
    if candidates.tries == len(candidates.words):
        return (probability * candidates.tries).log().float()
    return (-torch.expm1(candidates.tries * torch.log1p(-probability))).log().float()


@compiled
def _draw(key: np.uint64, log_range: float, words: Any, drawn: Any) -> int:
    """Fill `words` with distinct ones, marked in `drawn` [v]; return the number of tries."""
    count = tries = 0
    while count < len(words):
        word = (np.int64(math.exp(uniform(word_at(key, tries)) * log_range)) - 1) % len(drawn)
        tries += 1
        if not drawn[word]:
            drawn[word] = True
            words[count] = word
            count += 1
    return tries
