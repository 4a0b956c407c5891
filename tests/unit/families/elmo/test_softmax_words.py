"""Words drawn by rank beside TensorFlow's definition (range_sampler.cc), computed in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ctxlm_ds.data.numba_random import stream_key
from ctxlm_ds.families.elmo.softmax import Candidates, draw_candidates, log_expected_counts

VOCABULARY = 50


def probabilities(vocabulary: int) -> np.ndarray:
    words = np.arange(vocabulary, dtype=np.float64)
    return np.log((words + 2) / (words + 1)) / math.log1p(vocabulary)


def test_words_differ_and_belong_to_the_key() -> None:
    first, again, other = (draw_candidates(stream_key(key), 8192, 793_471) for key in (1, 1, 2))
    assert np.array_equal(first.words, again.words) and first.tries == again.tries > 8192
    assert not np.array_equal(first.words, other.words)
    assert (np.diff(first.words) > 0).all() and first.words[0] >= 0 and first.words[-1] < 793_471


def test_a_word_is_drawn_as_often_as_expected() -> None:
    """One try has the log-uniform distribution; distinct words are about as frequent as so many tries suggest."""
    singles = np.array([draw_candidates(stream_key(key), 1, VOCABULARY).words[0] for key in range(20_000)])
    shares = np.bincount(singles, minlength=VOCABULARY) / len(singles)
    assert np.abs(shares - probabilities(VOCABULARY)).max() < 0.01
    draws = [draw_candidates(stream_key(key), 10, VOCABULARY) for key in range(5000)]
    drawn = np.bincount(np.concatenate([each.words for each in draws]), minlength=VOCABULARY) / len(draws)
    expected = np.mean([1 - (1 - probabilities(VOCABULARY)) ** each.tries for each in draws], axis=0)
    assert np.abs(drawn - expected).max() < 0.03


@pytest.mark.parametrize("tries", [4, 9, 100_000])
def test_expected_counts_are_those_of_tensorflow(tries: int) -> None:
    """Without repeated words the count is p times the number of words, else 1 - (1 - p)^tries."""
    p = probabilities(793_471)
    wanted = p * 4 if tries == 4 else -np.expm1(tries * np.log1p(-p))
    found = log_expected_counts(torch.arange(793_471), Candidates(np.arange(4), tries), 793_471)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.double().numpy(), np.log(wanted), rtol=1e-6, atol=1e-12)


def test_all_words_can_be_drawn() -> None:
    assert draw_candidates(stream_key(3), 5, 5).words.tolist() == [0, 1, 2, 3, 4]
