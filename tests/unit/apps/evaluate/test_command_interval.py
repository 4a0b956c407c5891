"""Bootstrap intervals: those of a mean are near the normal ones, groups keep their sizes, draws are the same again."""

from __future__ import annotations

import numpy as np
import pytest

from ctxlm_ds.apps.evaluate.command import bootstrap


def test_the_interval_of_a_mean_is_near_the_normal_one() -> None:
    values = np.random.default_rng(3).normal(size=400)
    low, high = bootstrap(lambda chosen: values[chosen].mean(), [0] * 400, 1000)
    half = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)
    assert (low, high) == bootstrap(lambda chosen: values[chosen].mean(), [0] * 400, 1000)


def test_examples_are_drawn_within_their_group() -> None:
    groups = ["a", "b", "a", "c", "c"]
    counts = {name: groups.count(name) for name in groups}
    drawn = []
    bootstrap(lambda chosen: drawn.append([groups[at] for at in chosen]) or 0.0, groups, 20)
    assert len(drawn) == 20 and all({name: one.count(name) for name in one} == counts for one in drawn)
    constant = np.array([1.0, 0.0, 1.0, 0.5, 0.5])
    assert bootstrap(lambda chosen: constant[chosen].mean(), groups, 20) == (0.6, 0.6)
