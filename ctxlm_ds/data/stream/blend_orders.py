"""Orders in which sources take turns: exact, keyed, and the same for every rank, batch size and restart.

In: shares of sources, a seed. Out: for positions of the stream the source, and how many of its rows came before (its
number). In each order a source's numbers are 0, 1, 2, ... without gap or repetition. Not here: rows (blend.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.numba_random import compiled
from ctxlm_ds.data.randomness import Permutation

PURPOSE = "blend"
SMALLEST_CYCLE = 1 << 16
LARGEST_CYCLE = 1 << 20
SMALLEST_QUOTA = 8
BLOCK = 1 << 16
BLOCKS_KEPT = 4

Turns = tuple[NDArray[np.int64], NDArray[np.int64]]
"""[n] sources and [n] numbers of n positions."""


class SourceOrder(Protocol):
    """An endless order of sources."""

    shares: NDArray[np.float64]
    """[sources], adding up to 1: each one's part of the positions, in the long run."""

    def at(self, positions: NDArray[np.int64]) -> Turns:
        """The turns at [n] positions, in any order."""
        ...


class EpochOrder:
    """Cycles that hold quotas[i] rows of source i, shuffled as a whole: sources one after another, each as often as
    its epochs say, under a permutation keyed by (seed, cycle). Needs no memory."""

    def __init__(self, quotas: Sequence[int], seed: int) -> None:
        self._quotas = np.array(quotas, dtype=np.int64)
        self._starts = np.cumsum(self._quotas) - self._quotas
        self._cycle = int(self._quotas.sum())
        self._seed = seed
        self.shares = self._quotas / self._cycle

    def at(self, positions: NDArray[np.int64]) -> Turns:
        cycles, within = np.divmod(positions, self._cycle)
        slots = np.empty_like(within)
        for cycle in np.unique(cycles).tolist():
            chosen = cycles == cycle
            slots[chosen] = Permutation(self._cycle, self._seed, PURPOSE, cycle)[within[chosen]]
        sources = np.searchsorted(self._starts, slots, side="right") - 1
        return sources, cycles * self._quotas[sources] + slots - self._starts[sources]


class WeightedOrder:
    """Short cycles (65,536 positions, up to 2^20 where a share is very small) that each hold a whole number of rows of
    every source, by largest remainder; their order within the cycle is keyed by (seed, cycle)."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._cycle = cycle_length(weights)
        self._quotas = quotas_of(weights, self._cycle)
        self._starts = np.cumsum(self._quotas) - self._quotas
        self._seed = seed
        self._turns = _Recent(self._turns_of)
        self.shares = self._quotas / self._cycle

    def at(self, positions: NDArray[np.int64]) -> Turns:
        cycles, within = np.divmod(positions, self._cycle)
        sources, numbers = _by_block(cycles, within, self._turns)
        numbers += cycles * self._quotas[sources]
        return sources, numbers

    def _turns_of(self, cycle: int) -> Turns:
        slots = Permutation(self._cycle, self._seed, PURPOSE, cycle)[np.arange(self._cycle, dtype=np.int64)]
        sources = np.searchsorted(self._starts, slots, side="right") - 1
        # Numbers rise with the position, or a small source's epochs would run into each other.
        positions = np.argsort(sources, kind="stable")
        numbers = np.empty(self._cycle, dtype=np.int64)
        numbers[positions] = np.arange(self._cycle) - self._starts[sources[positions]]
        return sources, numbers


class MegatronOrder:
    """Megatron's order: always the source that is furthest behind its share, the first of equals.

    Source: build_blending_indices (megatron/core/datasets/helpers.cpp), which stores it, 10 bytes a row. Here blocks of
    65,536 positions are computed when they are asked for, from the rows that each source had at their start (8 bytes a
    source and block); the first look at position p walks there once, some nanoseconds for each source and position.

    Args:
        weights: [sources] float64, adding up to 1 (megatron_weights).
    """

    def __init__(self, weights: NDArray[np.float64]) -> None:
        self.shares = weights
        self._before = [np.zeros(len(weights), dtype=np.int64)]
        self._turns = _Recent(self._turns_of)

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


class _Recent:
    """The last few blocks of turns."""

    def __init__(self, compute: Callable[[int], Turns]) -> None:
        self._compute = compute
        self._kept: dict[int, Turns] = {}

    def __call__(self, block: int) -> Turns:
        if block not in self._kept:
            while len(self._kept) >= BLOCKS_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[block] = self._compute(block)
        return self._kept[block]


def _by_block(blocks: NDArray[np.int64], within: NDArray[np.int64], turns: Callable[[int], Turns]) -> Turns:
    """Turns at places within blocks."""
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
    """Fill sources and numbers of the positions from `first` on; `taken` counts each source's rows so far."""
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
    """[sources] as Megatron's builder hands them on: given ones divided by their sum twice, else the rows once."""
    values = np.array(counts if weights is None else weights, dtype=np.float64)
    for _ in range(1 if weights is None else 2):
        values = values / np.sum(values)
    return values


def cycle_length(weights: Sequence[float]) -> int:
    """The shortest cycle, a power of two, in which the smallest share still has several rows."""
    smallest = min(weights) / sum(weights)
    length = SMALLEST_CYCLE
    while length < LARGEST_CYCLE and smallest * length < SMALLEST_QUOTA:
        length *= 2
    return length


def quotas_of(weights: Sequence[float], total: int) -> NDArray[np.int64]:
    """[sources] whole numbers in proportion to weights that add up to `total` (largest remainder; at least 1 each)."""
    exact = np.array(weights, dtype=np.float64) / sum(weights) * total
    quotas = np.maximum(np.floor(exact).astype(np.int64), 1)
    missing = total - int(quotas.sum())
    if missing > 0:
        quotas[np.argsort(quotas - exact, kind="stable")[:missing]] += 1
    else:  # the least shares were raised to 1
        quotas[int(np.argmax(quotas))] += missing
    return quotas
