"""Bootstrap intervals over examples.

Shape letters: n examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

SHARE = 0.95
"""Share of the resampled scores inside of the interval."""
SEED = 1
Places = NDArray[np.int64]


def bootstrap(score: Callable[[Places], float], groups: Sequence[object], resamples: int) -> tuple[float, float]:
    """Return the interval of a score over examples, which are drawn again with replacement within each group.

    `score` returns the score of the examples at some places [n]; `groups` [n] are paradigms, for example.
    """
    generator = np.random.default_rng(SEED)
    places: dict[object, list[int]] = {}
    for at, group in enumerate(groups):
        places.setdefault(group, []).append(at)
    found = [np.array(own, dtype=np.int64) for own in places.values()]
    draws = (np.concatenate([own[generator.integers(len(own), size=len(own))] for own in found])
             for _ in range(resamples))  # fmt: skip
    low, high = np.nanpercentile([score(chosen) for chosen in draws], (50 * (1 - SHARE), 50 * (1 + SHARE)))
    return float(low), float(high)
