"""Cut the list of layers into pipeline stages. Layers before the first block stay first, those after the last last.

training/engine/pipeline.py has DeepSpeed's pipeline module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.models.layers import LayerDescription, parameter_prefixes
from ctxlm_ds.recipe.schema import ParallelConfig


def plan_stages(
    layout: ParallelConfig, descriptions: Sequence[LayerDescription], shapes: Mapping[str, Sequence[int]]
) -> list[int]:
    """Return the first layer of each stage, and the number of layers at the end, for the run and the planner.

    `shapes` are those of the complete model's trained parameters. Raises ConfigError if the layers do not fill the
    stages, or a stage has nothing to train.
    """
    trained = parameter_costs(descriptions, shapes)
    if layout.pipeline_layers is not None:
        bounds = bounds_of_counts(descriptions, layout.pipeline_layers)
    else:
        balances_blocks = layout.pipeline_partition == "uniform"
        costs = [float(description.block) for description in descriptions] if balances_blocks else trained
        bounds = stage_bounds(descriptions, costs, layout.pipeline_parallel_size)
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        if not any(trained[start:stop]):
            raise ConfigError(
                f"pipeline stage {stage} would hold only layers of a teacher, and DeepSpeed needs a trained parameter "
                "in every stage; set parallel.pipeline_partition: parameters, or fewer stages"
            )
    return bounds


def blocks_per_stage(descriptions: Sequence[LayerDescription], bounds: Sequence[int]) -> list[int]:
    return [sum(layer.block for layer in descriptions[start:stop]) for start, stop in pairwise(bounds)]


def stage_bounds(descriptions: Sequence[LayerDescription], costs: Sequence[float], num_stages: int) -> list[int]:
    """Return the first layer of each stage, and the number of layers at the end; each stage has at least one block.

    The cut minimises the cost of the most expensive stage, from the `costs` of the layers in any unit. Among equally
    good ones it has fewer blocks on earlier stages, so every rank finds the same. Raises ConfigError if there are fewer
    blocks than stages.
    """
    blocks = _blocks(descriptions)
    if num_stages > len(blocks):
        raise ConfigError(
            f"parallel.pipeline_parallel_size: {num_stages} stages for {len(blocks)} transformer layers; set it to at "
            f"most {len(blocks)}"
        )
    # A layer between blocks belongs to the stage of the block before it, the first layers to that of the first block.
    starts = [0, *blocks[1:], len(costs)]
    spans = [sum(costs[start:stop]) for start, stop in pairwise(starts)]
    counts = _balance(spans, num_stages)
    return bounds_of_counts(descriptions, counts)


def bounds_of_counts(descriptions: Sequence[LayerDescription], counts: Sequence[int]) -> list[int]:
    """Return the bounds of stages with counts[k] transformer layers; ConfigError if these are not the model's."""
    blocks = _blocks(descriptions)
    if sum(counts) != len(blocks) or min(counts) < 1:
        raise ConfigError(
            f"parallel.pipeline_layers: {list(counts)} adds up to {sum(counts)} transformer layers, the model has "
            f"{len(blocks)} (each stage needs one)"
        )
    firsts = [blocks[number] for number in accumulate(counts[:-1])]
    return [0, *firsts, len(descriptions)]


def layer_parameters(descriptions: Sequence[LayerDescription], names: Iterable[str]) -> list[list[str]]:
    """Return the names of each layer's parameters; a tied layer has those of its first occurrence."""
    prefixes = parameter_prefixes(descriptions)
    found: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    for name in names:
        for prefix in accumulate(name.split("."), "{}.{}".format):
            if prefix in found:
                found[prefix].append(name)
    return [found[prefix] for prefix in prefixes]


def parameter_costs(descriptions: Sequence[LayerDescription], shapes: Mapping[str, Sequence[int]]) -> list[float]:
    """Return the elements of each layer's parameters; a tied layer counts on every stage that holds it."""
    return [float(sum(prod(shapes[name]) for name in names)) for names in layer_parameters(descriptions, shapes)]


def _blocks(descriptions: Sequence[LayerDescription]) -> list[int]:
    """Return where each block begins: at the first of the layers before it that a stage runs once for its blocks."""
    starts = []
    for index, description in enumerate(descriptions):
        if description.block:
            start = index
            while start > 0 and descriptions[start - 1].once:
                start -= 1
            starts.append(start)
    return starts


def _balance(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return the sizes of contiguous parts, none empty, that minimise the cost of the most expensive part.

    `best[k][stop]` is that cost for the first `stop` blocks in k + 1 parts. It grows with `stop`, and the cost of the
    last part falls with its start, so the best start is where the two meet, and it only moves forward with `stop`.
    """
    sums, count = [0.0, *accumulate(costs)], len(costs)
    best = [sums]
    for earlier in range(1, num_stages):
        before, row, start = best[-1], [float("inf")] * (count + 1), earlier
        for stop in range(earlier + 1, count + 1):
            while start < stop - 1 and before[start] < sums[stop] - sums[start]:
                start += 1
            row[stop] = max(before[start], sums[stop] - sums[start])
            if start > earlier:
                row[stop] = min(row[stop], max(before[start - 1], sums[stop] - sums[start - 1]))
        best.append(row)
    stops = [count]
    for earlier in range(num_stages - 1, 0, -1):
        before, stop, cost = best[earlier - 1], stops[-1], best[earlier][stops[-1]]
        stops.append(next(i for i in range(earlier, stop) if max(before[i], sums[stop] - sums[i]) <= cost))
    return [stop - start for stop, start in zip(stops, [*stops[1:], 0], strict=True)][::-1]
