"""Intervals of differences between arms: over seeds and items together, with a paired test over seeds.

Shape letters: s seeds, n items.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES, SEED = 5000, 0
INTERVAL = (2.5, 97.5)
ALPHA, POWER = 0.05, 0.8
"""Chance with which the smallest difference of a comparison would have been seen."""
Items = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """Of the means of two arms, the second minus the first."""

    mean: float
    low: float
    high: float
    """Ends of the 95 % interval of the Multi-Bootstrap."""
    p: float
    """Of the paired t test over seeds, two-sided; 1 for one seed."""
    smallest: float
    """The smallest difference that POWER of such tests would have seen."""

    @property
    def is_seen(self) -> bool:
        """Return whether the interval excludes 0 and so does the test: with few seeds a bootstrap is too narrow."""
        return (self.low > 0 or self.high < 0) and self.p < ALPHA


def items_of(values: Items, weights: NDArray[Any]) -> Items:
    """Return an item for each of some values [n] that count by weights [n], such as words or predictions.

    Their mean is the weighted mean, and resampled means vary as it does: what is more only because there are more words
    in a sentence does not widen an interval (the linearised ratio; Cochran 1977, section 6.3).
    """
    mean = (values * weights).sum() / weights.sum()
    return np.asarray(mean + (values - mean) * weights / weights.mean())


def interval(items: Items) -> tuple[float, float]:
    """Return the 95 % interval of the mean of an arm [s, n], of which seeds and items are drawn with replacement.

    This is the Multi-Bootstrap (arXiv:2106.16163, section 3).
    """
    rng = np.random.default_rng(SEED)
    num_seeds, num_items = items.shape
    seeds = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), RESAMPLES) / num_seeds
    columns = rng.multinomial(num_items, np.full(num_items, 1 / num_items), RESAMPLES) / num_items
    low, high = np.percentile(np.einsum("rs,sn,rn->r", seeds, items, columns, optimize=True), INTERVAL)
    return float(low), float(high)


def difference(first: Items, second: Items) -> Difference:
    """Compare two arms [s, n] whose seeds and items are paired (arXiv:2106.16163, section 4.1)."""
    from scipy.stats import ttest_rel
    from statsmodels.stats.power import TTestPower

    paired = second - first
    mean, (low, high), seeds = float(paired.mean()), interval(paired), paired.mean(axis=1)
    if len(seeds) == 1 or not paired.any():
        return Difference(mean, low, high, 1.0, math.inf)
    effect = TTestPower().solve_power(nobs=len(seeds), alpha=ALPHA, power=POWER)
    p = ttest_rel(second.mean(axis=1), first.mean(axis=1)).pvalue
    return Difference(mean, low, high, float(p), float(effect * seeds.std(ddof=1)))
