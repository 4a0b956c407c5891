"""Intervals over seeds and items: their coverage, what pairing gains, and the tests of other programs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_rel

from ctxlm_ds.apps.study.statistics import Items, difference, interval, items_of

SEEDS, ITEMS = 5, 40


def arm(rng: np.random.Generator, mean: float, shared: Items | None = None) -> Items:
    """Items of an arm: parts of seed, of item and of both; `shared` parts are those of its partner, too."""
    own = rng.normal(0, 0.02, (SEEDS, 1)) + rng.normal(0, 0.05, (SEEDS, ITEMS))
    return mean + own + (0.0 if shared is None else shared)


def parts(rng: np.random.Generator) -> Items:
    return rng.normal(0, 0.05, (SEEDS, 1)) + rng.normal(0, 0.5, (1, ITEMS))


def test_the_interval_holds_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    bounds = [interval(arm(rng, 3.0, parts(rng))) for _ in range(100)]
    assert 80 <= sum(low < 3.0 < high for low, high in bounds) <= 100


@pytest.mark.parametrize("num_items", [1, ITEMS])
def test_a_difference_between_equal_arms_is_rarely_seen(num_items: int) -> None:
    """One item: five seeds alone, of which the bootstrap excludes 0 three times as often as it says."""
    rng, seen = np.random.default_rng(2), 0
    for _ in range(200):
        shared = parts(rng)[:, :num_items]
        first, second = (arm(rng, 3.0)[:, :num_items] + shared for _ in range(2))
        seen += difference(first, second).is_seen
    assert seen <= 20


def test_items_vary_as_the_weighted_mean_does() -> None:
    """Sentences of very different lengths, of which the same share is right: only that share has a spread."""
    rng = np.random.default_rng(6)
    lengths = rng.integers(1, 80, 400)
    right = rng.binomial(lengths, 0.7)
    items = items_of(right / lengths, lengths)
    assert items.mean() == pytest.approx(right.sum() / lengths.sum())
    drawn = rng.integers(400, size=(3000, 400))
    shares = right[drawn].sum(axis=1) / lengths[drawn].sum(axis=1)
    assert items[drawn].mean(axis=1).std() == pytest.approx(shares.std(), rel=0.05)
    assert (right / lengths.mean())[drawn].mean(axis=1).std() > 3 * shares.std()
    assert items_of(right / lengths, np.ones(400)) == pytest.approx(right / lengths)


def test_what_arms_share_does_not_hide_their_difference() -> None:
    rng = np.random.default_rng(3)
    shared = parts(rng)
    first, second = arm(rng, 3.0, shared), arm(rng, 3.2, shared)
    found = difference(first, second)
    assert found == difference(first, second)
    assert found.mean == pytest.approx((second - first).mean())
    assert found.low > 0.1 and found.high < 0.3 and found.is_seen
    assert found.p == ttest_rel(second.mean(axis=1), first.mean(axis=1)).pvalue < 0.01
    assert 0.0 < found.smallest < 0.1
    # Without pairs the items' own spread, ten times the difference, decides.
    assert np.ptp(interval(first)) > np.ptp([found.low, found.high])


def test_equal_arms_and_one_seed_have_no_test() -> None:
    items = np.random.default_rng(4).normal(size=(SEEDS, ITEMS))
    same = difference(items, items)
    assert not same.is_seen and same.p == 1.0 and same.smallest == np.inf
    single = difference(items[:1], items[:1] + 1.0)
    assert single.p == 1.0 and single.low > 0 and not single.is_seen
