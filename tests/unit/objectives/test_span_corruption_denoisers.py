"""Counts and lengths of denoisers beside the published helper, written down here."""

from __future__ import annotations

from itertools import product

import numpy as np

from ctxlm_ds.objectives.span_corruption import LONGEST_TEXT, MOST_NOISE, Denoiser
from tests.each import each

PUBLISHED = Denoiser(0.15, 3.0)


def published_helper(inputs_length: int, density: float, mean: float) -> tuple[int, int]:
    """`random_spans_helper` with one sentinel for each span: tokens of text, tokens of the target."""

    def lengths(tokens: int) -> tuple[int, int]:
        noise = int(round(tokens * density))
        spans = int(round(noise / mean))
        return tokens - noise + spans + 1, noise + spans + 1

    tokens = inputs_length - 1
    while lengths(tokens + 1)[0] <= inputs_length:
        tokens += 1
    inputs, targets = lengths(tokens)
    if density == 0.5 and targets > inputs:
        return tokens - 1, targets - 1
    return tokens, targets


def published_counts(length: int, density: float, mean: float) -> tuple[int, int]:
    """`random_spans_noise_mask`'s numbers of tokens and spans, computed in float32 as there."""
    noise = int(np.rint(np.float32(length) * np.float32(density)))
    noise = min(max(noise, 1), length - 1)
    return noise, max(int(np.rint(np.float32(noise) / np.float32(mean))), 1)


def test_568_tokens_give_512_and_114() -> None:
    assert PUBLISHED.text_length(512) == 568
    assert PUBLISHED.lengths(568) == (512, 114)
    assert PUBLISHED.counts(568) == (85, 28)


@each("input_length, density, mean", product([32, 128, 511, 512, 2048], [0.15, 0.5], [3.0, 8.0]))
def test_lengths_are_those_of_the_published_helper(input_length: int, density: float, mean: float) -> None:
    denoiser = Denoiser(density, mean)
    length = denoiser.text_length(input_length)
    wanted, target = published_helper(input_length, density, mean)
    assert length == wanted
    # At 0.5 the helper shortens text and target by one, whatever target the shorter text makes.
    assert abs(denoiser.lengths(length)[1] - target) <= (density == 0.5)


@each("density, mean", [(0.15, 3.0), (0.5, 3.0), (0.25, 32.0), (0.1, 2.0)])
def test_counts_are_those_of_the_published_mask(density: float, mean: float) -> None:
    denoiser = Denoiser(density, mean)
    for length in range(2, 3000):
        assert denoiser.counts(length) == published_counts(length, density, mean), length


def test_shorter_texts_never_make_more() -> None:
    for denoiser in (PUBLISHED, Denoiser(0.5, 64.0), Denoiser(0.3, 1.0), Denoiser(0.5, None)):
        most = denoiser.text_length(100)
        lengths = [denoiser.lengths(length) for length in range(1, most + 1)]
        assert max(inputs for inputs, _ in lengths) <= 100
        assert max(targets for _, targets in lengths) == lengths[-1][1]


def test_a_prefix_leaves_room_for_the_end_token() -> None:
    denoiser = Denoiser(0.5, None)
    assert denoiser.text_length(512) == 511
    assert denoiser.prefix_bounds(511) == (1, 510)
    assert denoiser.prefix_bounds(1) == (0, 0)
    assert denoiser.lengths(511) == (511, 511)


def test_a_mode_token_takes_a_place_of_the_input() -> None:
    denoiser = Denoiser(0.15, 3.0, mode_token="[R]")
    length = denoiser.text_length(512)
    assert length == PUBLISHED.text_length(511)
    assert denoiser.lengths(length)[0] <= 512


@each("density, mean, input_length", product([1e-6, 0.15, 0.5, MOST_NOISE], [1.0, 2.5, 64.0, 1e6], [8, 9, 33, 3001]))
def test_the_text_is_the_longest_that_fits(density: float, mean: float, input_length: int) -> None:
    denoiser = Denoiser(density, mean)
    length = denoiser.text_length(input_length)
    assert all(denoiser.lengths(shorter)[0] <= input_length for shorter in range(length + 1))
    assert length < LONGEST_TEXT * input_length
    assert denoiser.lengths(length + 1 + (density == 0.5))[0] > input_length


def test_a_text_that_is_all_noise_has_an_end() -> None:
    assert Denoiser(1.0, 1e6).text_length(1 << 20) == LONGEST_TEXT << 20
    assert Denoiser(MOST_NOISE, 3.0).text_length(1 << 20) < 5.1 * (1 << 20)
