"""Inputs and targets of denoisers beside the published algorithm, written down here with the same draws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ctxlm_ds.data.numba_random import below, stream, stream_key, word_at
from ctxlm_ds.data.sample import TargetExamples
from ctxlm_ds.objectives.corruption.noise_spans import FIRST_TOKEN_WORD, NO_MODE, denoise, denoiser_tables
from ctxlm_ds.objectives.span_corruption import Denoiser
from tests.ragged import Sample, each, samples_from

KEY = stream_key(1, "mask")
VOCABULARY, END = 32_100, 1
SENTINELS = np.arange(VOCABULARY - 1, VOCABULARY - 101, -1, dtype=np.int32)
T5, LONG, PREFIX = Denoiser(0.15, 3.0), Denoiser(0.5, 64.0), Denoiser(0.5, None)


def texts(count: int, length: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 32_000, size=(count, length)).astype(np.int32)
    return [Sample(row, np.zeros_like(row), np.zeros(length, dtype=np.bool_), -1) for row in ids]


def corrupt(samples: Sequence[Sample], denoisers: Sequence[Denoiser] = (T5,)) -> TargetExamples:
    tables = denoiser_tables(denoisers, 512, [NO_MODE] * len(denoisers), SENTINELS, END)
    return denoise(samples_from(samples), KEY, tables)


# The published algorithm.


def shuffled(count: int, ones: int, state: np.uint64, first: int) -> NDArray[np.bool_]:
    """What `stateless_shuffle(range(count) < ones)` is for the draws of our streams."""
    flags = np.zeros(count, dtype=np.bool_)
    for place in range(count):
        flags[place] = below(np.uint64(word_at(state, first + place)), count - place) < ones - flags.sum()
    return flags


def random_segmentation(items: int, segments: int, state: np.uint64, first: int) -> NDArray[np.int64]:
    starts = np.concatenate([[0], shuffled(items - 1, segments - 1, state, first)]).astype(np.int64)
    return np.bincount(np.cumsum(starts), minlength=segments)


def noise_mask(length: int, state: np.uint64, denoiser: Denoiser) -> NDArray[np.bool_]:
    noise = min(max(int(np.rint(np.float32(length) * np.float32(denoiser.noise_density))), 1), length - 1)
    spans = max(int(np.rint(np.float32(noise) / np.float32(denoiser.mean_span_length))), 1)
    noise_lengths = random_segmentation(noise, spans, state, FIRST_TOKEN_WORD)
    other_lengths = random_segmentation(length - noise, spans, state, FIRST_TOKEN_WORD + noise)
    interleaved = np.stack([other_lengths, noise_lengths], axis=1).reshape(-1)
    starts = np.zeros(length, dtype=np.int64)
    starts[np.cumsum(interleaved)[:-1]] = 1
    return np.cumsum(starts) % 2 == 1


def to_unique_sentinel(tokens: NDArray[np.int32], mask: NDArray[np.bool_]) -> list[int]:
    before = np.concatenate([[False], mask[:-1]])
    first, later = mask & ~before, mask & before
    replaced = np.where(first, VOCABULARY - np.cumsum(first), tokens)
    return replaced[~later].tolist()


@pytest.mark.parametrize("denoiser", [T5, LONG], ids=["T5", "long spans"])
@pytest.mark.parametrize("length", [2, 3, 7, 40, 200, 567, 568])
def test_the_published_algorithm_gives_the_same(length: int, denoiser: Denoiser) -> None:
    samples = texts(20, length)
    keys = samples_from(samples).keys
    for sample, key, example in zip(samples, keys, each(corrupt(samples, (denoiser,))), strict=True):
        mask = noise_mask(length, np.uint64(stream(KEY, *key)), denoiser)
        assert example.input_ids.tolist() == [*to_unique_sentinel(sample.input_ids, mask), END]
        assert example.target_ids.tolist() == [*to_unique_sentinel(sample.input_ids, ~mask), END]


def test_tokens_of_the_sample_format_are_left_out() -> None:
    (sample,) = texts(1, 40)
    framed = Sample(
        np.concatenate([[2], sample.input_ids, [3]]).astype(np.int32), np.zeros(42, dtype=np.int32),
        np.array([True] + [False] * 40 + [True]), -1,
    )  # fmt: skip
    plain, other = (each(corrupt([one]))[0] for one in (sample, framed))
    assert plain.input_ids.tolist() == other.input_ids.tolist()


def test_one_token_is_kept() -> None:
    (example,) = each(corrupt(texts(1, 1)))
    assert example.target_ids.tolist() == [VOCABULARY - 1, END]
    assert len(example.input_ids) == 2


def test_a_prefix_has_every_length_equally_often() -> None:
    samples, count = texts(1, 11) * 5000, 5000
    found = Counter(len(example.input_ids) - 1 for example in each(corrupt(samples, (PREFIX,))))
    assert set(found) == set(range(1, 11))
    for times in found.values():
        assert abs(times / count - 0.1) < 4 * math.sqrt(0.09 / count)
    for example in each(corrupt(samples[:20], (PREFIX,))):
        assert [*example.input_ids[:-1], *example.target_ids[:-1]] == samples[0].input_ids.tolist()
