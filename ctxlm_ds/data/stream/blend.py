"""The source and row of each position in the endless training stream.

Without a blend all rows follow a RowOrder. A blend decides in two steps. An order of sources gives the source of a
position and its number among all rows of that source. That number is epoch number // rows of the source, in which it is
place number % rows of a permutation keyed by (seed, source, epoch). So all rows of a source come once before any comes
again (`concatenate` mixes the passes of `epochs` above 1), and their masks change with the source's epoch. Every
position is computed by itself, so that a resume needs one number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.numba_random import Permutation, compiled
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.schema import TrainingConfig
from ctxlm_ds.recipe.sections import DataSection
from ctxlm_ds.recipe.source_rules import source_names

EPOCH_PURPOSE = "row_order"
ROWS_PURPOSE = "blend_rows"
ORDER_PURPOSE = "blend"
SMALLEST_CYCLE = 1 << 16
LARGEST_CYCLE = 1 << 20
SMALLEST_QUOTA = 8
BLOCK = 1 << 16
BLOCKS_KEPT = 4

Turns = tuple[NDArray[np.int64], NDArray[np.int64]]
"""[n] sources and [n] numbers of n positions. In each order the numbers of a source are 0, 1, 2, ... without gaps."""


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Rows of some positions of a stream."""

    rows: NDArray[np.int64]
    """Rows of the row space, in the shape of the positions; -1 for an empty row."""
    epochs: NDArray[np.int64]
    """Epoch in which each is read."""


class RowOrder:
    """All rows once per epoch: position t is row order_e[t mod n] of epoch e = t div n; (seed, e) is order_e's key."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows = num_rows
        self.seed = seed

    def at(self, positions: NDArray[np.int64]) -> PlannedRows:
        """Return the rows at positions (any shape), and the epoch in which each is read."""
        return PlannedRows(*_permuted(positions, self.num_rows, self.seed, EPOCH_PURPOSE))

    def epoch_of(self, position: int) -> int:
        return position // self.num_rows


class LaneOrder:
    """Rows in lanes: position s·L + r, row r of step s, continues row r of step s - 1.

    An epoch of W rows and L lanes has W // L steps. Lane r reads rows r·(W // L), r·(W // L) + 1, ... of the epoch; the
    last W mod L rows, others in each epoch, are left out. The next epoch's rows follow in the same lanes. Raises
    DataError if an epoch has fewer rows than lanes.
    """

    def __init__(self, num_rows: int, lanes: int) -> None:
        self.lanes = lanes
        self.steps_per_epoch = num_rows // lanes
        if self.steps_per_epoch == 0:
            raise DataError(
                f"data.train gives {num_rows} rows, fewer than the {lanes} lanes of a batch; lower "
                "training.global_batch_size or data.seq_length, or train on more text"
            )

    def at(self, positions: NDArray[np.int64]) -> PlannedRows:
        steps, lanes = np.divmod(positions, self.lanes)
        epochs, places = np.divmod(steps, self.steps_per_epoch)
        return PlannedRows(lanes * self.steps_per_epoch + places, epochs)

    def epoch_of(self, position: int) -> int:
        return position // (self.lanes * self.steps_per_epoch)


def _permuted(
    positions: NDArray[np.int64], size: int, seed: int, purpose: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the place of each position under its cycle's permutation of `size`, and the cycle."""
    cycles, within = np.divmod(positions, size)
    places = np.empty_like(positions)
    for cycle in np.unique(cycles).tolist():
        chosen = cycles == cycle
        places[chosen] = Permutation(size, seed, purpose, cycle)[within[chosen]]
    return places, cycles


class EpochOrder:
    """Cycles that hold quotas[i] rows of source i, under a permutation keyed by (seed, cycle)."""

    def __init__(self, quotas: Sequence[int] | NDArray[np.int64], seed: int) -> None:
        self._quotas = np.array(quotas, dtype=np.int64)
        self._starts = np.cumsum(self._quotas) - self._quotas
        self._cycle = int(self._quotas.sum())
        self._seed = seed
        self.shares: NDArray[np.float64] = self._quotas / self._cycle
        """[sources], adding up to 1: the share of each in the positions of a long run."""

    def at(self, positions: NDArray[np.int64]) -> Turns:
        """Return the turns at [n] positions, in any order."""
        slots, cycles = _permuted(positions, self._cycle, self._seed, ORDER_PURPOSE)
        sources = np.searchsorted(self._starts, slots, side="right") - 1
        return sources, cycles * self._quotas[sources] + slots - self._starts[sources]


class WeightedOrder(EpochOrder):
    """Cycles of 65,536 positions (up to 2^20 if a share is very small) with a whole number of rows of every source.

    The numbers are found by largest remainder; a source's rows keep their order within a cycle.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        super().__init__(quotas_of(weights, cycle_length(weights)), seed)
        self._turns = lru_cache(BLOCKS_KEPT)(self._turns_of)

    def at(self, positions: NDArray[np.int64]) -> Turns:
        cycles, within = np.divmod(positions, self._cycle)
        sources, numbers = _by_block(cycles, within, self._turns)
        numbers += cycles * self._quotas[sources]
        return sources, numbers

    def _turns_of(self, cycle: int) -> Turns:
        slots = Permutation(self._cycle, self._seed, ORDER_PURPOSE, cycle)[np.arange(self._cycle, dtype=np.int64)]
        sources = np.searchsorted(self._starts, slots, side="right") - 1
        # Numbers rise with the position, or a small source's epochs would run into each other.
        positions = np.argsort(sources, kind="stable")
        numbers = np.empty(self._cycle, dtype=np.int64)
        numbers[positions] = np.arange(self._cycle) - self._starts[sources[positions]]
        return sources, numbers


class MegatronOrder:
    """Megatron's order: always the source that is furthest behind its share, the first of equals.

    Source: build_blending_indices (megatron/core/datasets/helpers.cpp), which stores it, 10 bytes per row. Here blocks
    of 65,536 positions are computed on demand, from the rows that each source had at their start (8 bytes per source
    and block). The first look at position p walks there once, some nanoseconds for each source and position. The
    weights [sources] add up to 1 (megatron_weights).
    """

    def __init__(self, weights: NDArray[np.float64]) -> None:
        self.shares = weights
        self._before = [np.zeros(len(weights), dtype=np.int64)]
        self._turns = lru_cache(BLOCKS_KEPT)(self._turns_of)

    def at(self, positions: NDArray[np.int64]) -> Turns:
        blocks, within = np.divmod(positions, BLOCK)
        return _by_block(blocks, within, self._turns)

    def _turns_of(self, block: int) -> Turns:
        sources, numbers = np.empty(BLOCK, dtype=np.int64), np.empty(BLOCK, dtype=np.int64)
        for walked in range(min(block, len(self._before) - 1), block + 1):
            taken = self._before[walked].copy()
            take_turns(self.shares, taken, walked * BLOCK, sources, numbers)
            if walked + 1 == len(self._before):
                self._before.append(taken)
        return sources, numbers


def _by_block(blocks: NDArray[np.int64], within: NDArray[np.int64], turns: Callable[[int], Turns]) -> Turns:
    """Return the turns at places within blocks."""
    sources, numbers = np.empty(len(within), dtype=np.int64), np.empty(len(within), dtype=np.int64)
    for block in np.unique(blocks).tolist():
        chosen = blocks == block
        block_sources, block_numbers = turns(block)
        sources[chosen], numbers[chosen] = block_sources[within[chosen]], block_numbers[within[chosen]]
    return sources, numbers


@compiled
def take_turns(
    weights: NDArray[np.float64],
    taken: NDArray[np.int64],
    first: int,
    sources: NDArray[np.int64],
    numbers: NDArray[np.int64],
) -> None:
    """Fill in sources and numbers of the positions from `first`; `taken` counts each source's rows so far."""
    for place in range(len(sources)):
        scale = max(float(first + place), 1.0)
        furthest = 0
        most = weights[0] * scale - float(taken[0])
        for source in range(1, len(weights)):
            behind = weights[source] * scale - float(taken[source])
            if behind > most:
                most = behind
                furthest = source
        sources[place] = furthest
        numbers[place] = taken[furthest]
        taken[furthest] += 1


def megatron_weights(weights: Sequence[float] | None, counts: Sequence[int]) -> NDArray[np.float64]:
    """Return [sources] shares as Megatron's builder computes them: weights divided by their sum twice, rows once."""
    values = np.array(counts if weights is None else weights, dtype=np.float64)
    for _ in range(1 if weights is None else 2):
        values = values / np.sum(values)
    return values


def cycle_length(weights: Sequence[float]) -> int:
    """Return the shortest cycle, a power of two, in which the smallest share still has several rows."""
    smallest = min(weights) / sum(weights)
    length = SMALLEST_CYCLE
    while length < LARGEST_CYCLE and smallest * length < SMALLEST_QUOTA:
        length *= 2
    return length


def quotas_of(weights: Sequence[float], total: int) -> NDArray[np.int64]:
    """Return [sources] whole numbers in proportion to weights that add up to `total`, at least 1 each."""
    exact = np.array(weights, dtype=np.float64) / sum(weights) * total
    quotas = np.maximum(np.floor(exact).astype(np.int64), 1)
    missing = total - int(quotas.sum())
    if missing > 0:
        quotas[np.argsort(quotas - exact, kind="stable")[:missing]] += 1
    else:  # the least shares were raised to 1
        quotas[int(np.argmax(quotas))] += missing
    return quotas


class BlendedRows:
    """The stream in which an order of sources chooses the source of each row; the seed decides each source's order.

    `counts` are the rows of each source in one of its epochs; `epoch_rows` is the positions in an epoch of the stream.
    """

    def __init__(self, order: EpochOrder | MegatronOrder, counts: Sequence[int], seed: int, epoch_rows: int) -> None:
        self.order = order
        self.seed = seed
        self.epoch_rows = epoch_rows
        self._counts = np.array(counts, dtype=np.int64)
        self._starts = np.cumsum(self._counts) - self._counts

    def at(self, positions: NDArray[np.int64]) -> PlannedRows:
        sources, numbers = self.order.at(positions.ravel())
        epochs, within = np.divmod(numbers, self._counts[sources])
        # Places of the same epoch of the same source, one group after another.
        places = np.lexsort((epochs, sources))
        changes = np.flatnonzero(np.diff(sources[places]) | np.diff(epochs[places])) + 1
        rows = np.empty(len(within), dtype=np.int64)
        for group in filter(len, np.split(places, changes)):
            source, epoch = int(sources[group[0]]), int(epochs[group[0]])
            order = Permutation(int(self._counts[source]), self.seed, ROWS_PURPOSE, source, epoch)
            rows[group] = self._starts[source] + order[within[group]]
        return PlannedRows(rows.reshape(positions.shape), epochs.reshape(positions.shape))

    def epoch_of(self, position: int) -> int:
        return position // self.epoch_rows


RowStream = RowOrder | LaneOrder | BlendedRows


def train_stream(rows: RowSource, data: DataSection, training: TrainingConfig) -> RowStream:
    """Return the stream of a run over the rows of data.train, one index for each."""
    return stream_of([len(index) for index in rows.indexes], data, training)


def stream_of(counts: Sequence[int], data: DataSection, training: TrainingConfig) -> RowStream:
    """Return the stream over sources that have so many rows in an epoch."""
    seed = training.seed
    if data.in_lanes or data.blend == "in_order":
        return LaneOrder(sum(counts), training.global_batch_size if data.in_lanes else 1)
    epochs = [source.epochs or 1.0 for source in data.train]
    if data.blend == "concatenate" and all(number == 1.0 for number in epochs):
        return RowOrder(sum(counts), seed)
    empty = [name for name, count in zip(source_names(data), counts, strict=True) if count == 0]
    if empty:
        raise DataError(
            f"data.train: {', '.join(empty)} gives no row of this format and length, but data.blend {data.blend} "
            "asks for some; leave it out of data.train, or change data.sample_format"
        )
    if data.blend == "concatenate":
        quotas = [max(1, round(number * count)) for number, count in zip(epochs, counts, strict=True)]
        return BlendedRows(EpochOrder(quotas, seed), counts, seed, sum(quotas))
    weights = [source.weight for source in data.train if source.weight is not None]
    if data.blend == "temperature":
        weights = [count ** (1.0 / data.temperature) for count in counts]
    is_megatron = data.blend == "megatron"
    order = MegatronOrder(megatron_weights(weights or None, counts)) if is_megatron else WeightedOrder(weights, seed)
    return BlendedRows(order, counts, seed, sum(counts))


def stream_shares(rows: RowSource, data: DataSection, training: TrainingConfig) -> list[float]:
    """Return the share of each of data.train in the rows of a long run."""
    stream = train_stream(rows, data, training)
    if isinstance(stream, BlendedRows):
        return stream.order.shares.tolist()
    return [len(index) / max(1, len(rows)) for index in rows.indexes]
