"""Cutting the list of layers into pipeline stages: what precedes the blocks stays first, what follows them last.

In: the descriptions and what each layer costs (parameters, seconds, or 1 a block). Out: bounds of the stages.
Not here: measuring (training/stage_timing.py), DeepSpeed's pipeline module (training/pipeline.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from ctxlm_ds.errors import ConfigError


class LayerInList(Protocol):
    """What cutting needs of a layer; without torch, so that plans can be made where there is none."""

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> bool: ...


def stage_bounds(descriptions: Sequence[LayerInList], costs: Sequence[float], num_stages: int) -> list[int]:
    """First layer of each stage, and the number of layers at the end: the dearest stage is as cheap as can be.

    Embeddings are on the first stage, the heads and the decoder on the last, and every stage has at least one block.
    Of equally good cuts the one with fewer blocks on earlier stages is taken, so every rank finds the same.

    Args:
        costs: one a layer, of any unit.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    blocks = _blocks(descriptions)
    if num_stages > len(blocks):
        raise ConfigError(
            f"parallel.pipeline_parallel_size: {num_stages} stages for {len(blocks)} transformer layers; set it to at "
            f"most {len(blocks)}"
        )
    block_costs = [costs[index] for index in blocks]
    block_costs[0] += sum(costs[: blocks[0]])
    block_costs[-1] += sum(costs[blocks[-1] + 1 :])
    counts = _balance(block_costs, num_stages)
    return bounds_of_counts(descriptions, counts)


def bounds_of_counts(descriptions: Sequence[LayerInList], counts: Sequence[int]) -> list[int]:
    """The bounds where stage k has counts[k] transformer layers.

    Raises:
        ConfigError: the counts do not add up to the model's layers.
    """
    blocks = _blocks(descriptions)
    if sum(counts) != len(blocks) or min(counts) < 1:
        raise ConfigError(
            f"parallel.pipeline_layers: {list(counts)} adds up to {sum(counts)} transformer layers, the model has "
            f"{len(blocks)} (each stage needs one)"
        )
    firsts = [blocks[number] for number in accumulate(counts[:-1])]
    return [0, *firsts, len(descriptions)]


def parameter_costs(descriptions: Sequence[LayerInList], shapes: Mapping[str, Sequence[int]]) -> list[float]:
    """Elements of each layer's parameters; a tied layer counts wherever it occurs, for both stages hold it."""
    costs = []
    for description in descriptions:
        prefix = f"{description.name}."
        sizes = [shape for name, shape in shapes.items() if name.startswith(prefix)]
        costs.append(float(sum(_product(size) for size in sizes)))
    return costs


def block_costs(descriptions: Sequence[LayerInList]) -> list[float]:
    """1 for each block, 0 for all else: an equal number of transformer layers a stage."""
    return [float(description.block) for description in descriptions]


def _blocks(descriptions: Sequence[LayerInList]) -> list[int]:
    return [index for index, description in enumerate(descriptions) if description.block]


def _balance(costs: Sequence[float], num_stages: int) -> list[int]:
    """Items of each contiguous part, none empty, such that the dearest part is as cheap as possible."""
    sums = [0.0, *accumulate(costs)]
    count = len(costs)
    best = [[float("inf")] * (count + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (count + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        for stop in range(stage, count + 1):
            for start in range(stage - 1, stop):
                dearest = max(best[stage - 1][start], sums[stop] - sums[start])
                if dearest < best[stage][stop]:
                    best[stage][stop], cut[stage][stop] = dearest, start
    stops = [count]
    for stage in range(num_stages, 0, -1):
        stops.append(cut[stage][stops[-1]])
    return [stop - start for stop, start in zip(stops[:-1], stops[1:], strict=True)][::-1]


def _product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
