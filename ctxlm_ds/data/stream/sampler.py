"""The rows of each step and rank: a pure function of the position in an endless stream of rows.

The stream is a RowOrder, or a blend of sources (blend.py). Step k of a run that has consumed r rows takes positions
r + k·G .. r + (k + 1)·G (an epoch may end inside it); its micro-batch g takes g·m .. (g + 1)·m of these and belongs to
data-parallel rank g mod dp. So a resume needs one number, and neither ranks nor micro-batches nor workers change the
rows of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.numba_random import Permutation
from ctxlm_ds.errors import ConfigError

PURPOSE = "row_order"


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The division of a step's rows into micro-batches of ranks."""

    global_batch_size: int
    micro_batch_size: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        share = self.micro_batch_size * self.data_parallel_size
        if self.global_batch_size % share:
            nearest = max(1, round(self.global_batch_size / share)) * share
            raise ConfigError(
                f"training.global_batch_size {self.global_batch_size} is not a multiple of training.micro_batch_size "
                f"{self.micro_batch_size} times data-parallel size {self.data_parallel_size}; the nearest is {nearest}"
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one rank in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    def offsets(self) -> NDArray[np.int64]:
        """Return [micro_batches, micro_batch_size] positions of this rank in a step, in the order of computation."""
        own = self.data_parallel_rank + self.data_parallel_size * np.arange(self.micro_batches, dtype=np.int64)
        return own[:, None] * self.micro_batch_size + np.arange(self.micro_batch_size, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Rows of some positions of a stream."""

    rows: NDArray[np.int64]
    """Rows of the row space, in the shape of the positions; -1 for an empty row."""
    epochs: NDArray[np.int64]
    """Epoch in which each is read."""


class RowStream(Protocol):
    """An endless stream of rows: a function from positions."""

    def at(self, positions: NDArray[np.int64]) -> PlannedRows:
        """Return the rows at positions (any shape), and the epoch (of its source) in which each is read."""

    def epoch_of(self, position: int) -> int:
        """Return the epoch of the stream that a position is in."""


class RowOrder:
    """All rows once per epoch.

    Position t is row order_e[t mod n] of epoch e = t div n, order_e being a permutation keyed by (seed, e).
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows = num_rows
        self.seed = seed

    def at(self, positions: NDArray[np.int64]) -> PlannedRows:
        epochs, within = np.divmod(positions, self.num_rows)
        rows = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            rows[chosen] = Permutation(self.num_rows, self.seed, PURPOSE, epoch)[within[chosen]]
        return PlannedRows(rows, epochs)

    def epoch_of(self, position: int) -> int:
        return position // self.num_rows


def step_rows(stream: RowStream, plan: BatchPlan, start_row: int) -> Iterator[PlannedRows]:
    """Yield one rank's [micro_batches, micro_batch_size] rows of every step from `start_row`, endlessly."""
    for step_start in itertools.count(start_row, plan.global_batch_size):
        yield stream.at(step_start + plan.offsets())
