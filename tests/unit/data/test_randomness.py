"""Draws belong to their key, not to the order in which they are made."""

from __future__ import annotations

import numpy as np
import pytest

from ctxlm_ds.data.randomness import (
    KeyedStreams,
    Permutation,
    SampleDraws,
    ScalarDraws,
    generator,
    hash_words,
    uniforms,
)


def test_generator_depends_on_every_part_of_its_key() -> None:
    keys = [(1, "a"), (2, "a"), (1, "b"), (1, "a1"), (1, "a", 1), (1, "a", 2), (1, "a", "1"), (1, "a", 1, 2)]
    drawn = [generator(*key).random(4).tolist() for key in keys]
    assert generator(1, "a").random(4).tolist() == drawn[0]
    assert len({tuple(row) for row in drawn}) == len(keys)


def test_streams_are_numpys_philox_at_the_counter_of_their_key() -> None:
    streams = KeyedStreams(3, "purpose")
    expected = np.random.Philox(key=hash_words(2, 3, "purpose"), counter=np.array([0, 5, 6, 7], dtype=np.uint64))
    assert np.array_equal(streams.words((5, 6, 7), 300), expected.random_raw(300))


def test_streams_do_not_depend_on_order_and_longer_requests_begin_alike() -> None:
    streams = KeyedStreams(3, "purpose")
    first = streams.words((0, 1, 2), 10)
    streams.words((9, 9, 9), 3)
    streams.start((4, 4, 4))
    streams.next_words(5)
    assert np.array_equal(streams.words((0, 1, 2), 999)[:10], first)
    assert not np.array_equal(streams.words((1, 0, 2), 10), first)
    assert not np.array_equal(KeyedStreams(4, "purpose").words((0, 1, 2), 10), first)


def test_batch_of_draws_is_each_samples_own() -> None:
    streams = KeyedStreams(1, "mask")
    keys = [(number, 0, 8) for number in range(20)]
    together = SampleDraws(streams, keys).words(33)
    alone = SampleDraws(streams, keys[7:8]).words(40)
    assert np.array_equal(together[7], alone[0, :33])
    assert len(np.unique(together)) == together.size


def test_scalar_draws_are_uniform_and_inclusive() -> None:
    draws = ScalarDraws(KeyedStreams(1, "x"), (0, 0, 0))
    values = np.array([draws.random() for _ in range(20_000)])
    assert values.min() >= 0.0 and values.max() < 1.0
    assert abs(values.mean() - 0.5) < 4 * np.sqrt(1 / 12 / len(values))
    dice = np.bincount([draws.randint(1, 6) for _ in range(12_000)], minlength=7)
    assert dice[0] == 0 and len(dice) == 7
    assert np.abs(dice[1:] - 2000).max() < 5 * np.sqrt(12_000 * 5 / 36)
    assert draws.randint(3, 3) == 3


def test_uniforms_span_the_unit_interval() -> None:
    edges = uniforms(np.array([0, (1 << 64) - 1], dtype=np.uint64))
    assert edges[0] == 0.0 and 1 - 1e-15 < edges[1] < 1.0


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 4097])
def test_permutation_is_a_bijection(size: int) -> None:
    permutation = Permutation(size, 1, "order", 0)
    assert sorted(permutation[np.arange(size)].tolist()) == list(range(size))


def test_permutation_is_computed_anywhere_and_changes_with_its_key() -> None:
    size = 1 << 40
    positions = np.array([0, 1, size - 1, 123_456_789_012])
    one, other = Permutation(size, 1, "order", 0), Permutation(size, 1, "order", 1)
    assert np.array_equal(one[positions], [one[positions[k : k + 1]][0] for k in range(4)])
    assert not np.array_equal(one[positions], other[positions])
    assert one[positions].min() >= 0 and one[positions].max() < size


def test_permutations_are_uniform_over_places() -> None:
    """Over many keys each element comes equally often to each place; neighbours do not stay together."""
    size, keys = 10, 4000
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), Permutation(size, key, "order")[np.arange(size)]] += 1
    expected = keys / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = (size - 1) ** 2
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees)
    order = Permutation(100_000, 5, "order")[np.arange(100_000)]
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert (np.abs(np.diff(order)) == 1).mean() < 1e-3
