"""Which piece of which parameter each rank of a layout will hold, told without that layout's ranks.

In: a recipe, the shapes of its parameters, the sizes of the layout. Out: every rank's pieces. They follow what
DeepSpeed does with the same layout (flat partitions of the two parameter groups under ZeRO 1 and 2, equal cuts of each
parameter under 3), so that a rank finds nearly all it needs in files of its own; any other cut would read back too.
Not here: reading and writing (reshape.py), the parts that tensor-parallel ranks have (parallel/placement.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ctxlm_ds.checkpoint.parameter_check import check_parameters
from ctxlm_ds.kernels.dispatch import choose_kernels
from ctxlm_ds.models.build import build_layer_list
from ctxlm_ds.models.layer_list import LayerDescription, LayerSequence
from ctxlm_ds.models.stages import block_costs, bounds_of_counts, parameter_costs, stage_bounds
from ctxlm_ds.objectives.build import objective_terms
from ctxlm_ds.parallel.placement import shard_of, split_axis, vocabulary_rows_per_rank
from ctxlm_ds.parallel.shards import Shard
from ctxlm_ds.recipe.layout import layout_problems
from ctxlm_ds.recipe.problems import Problem, raise_problems
from ctxlm_ds.recipe.schema import KernelsConfig, RunConfig

Shapes = Mapping[str, tuple[int, ...]]
ALIGNMENT = 2
"""DeepSpeed pads a flat group to a multiple of this times the data-parallel size (ZeRO 1 and 2)."""
MAX_PIECE_ELEMENTS = 1 << 26
"""A rank's piece is written in parts of at most 256 MiB, so that no more of it is in memory at once."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the three parallel axes and the ZeRO stage."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    zero_stage: int = 1

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def rank(self, stage: int, data: int, tensor: int) -> int:
        """Global rank: tensor-parallel neighbours first, then data-parallel ones, then stages."""
        return tensor + self.tensor_parallel_size * (data + self.data_parallel_size * stage)

    def __str__(self) -> str:
        return (
            f"tp {self.tensor_parallel_size} x pp {self.pipeline_parallel_size} x dp {self.data_parallel_size}, "
            f"ZeRO {self.zero_stage}"
        )


class PlannedPiece(NamedTuple):
    """Elements start..start+length of a shard's local order."""

    name: str
    shard: Shard
    start: int
    length: int


class _Held(NamedTuple):
    """One parameter of a rank's model."""

    name: str
    shard: Shard
    num_elements: int
    """With the rows that pad the vocabulary."""
    duplicate: bool
    """Another rank writes it."""


def with_layout(config: RunConfig, layout: Layout) -> RunConfig:
    """The recipe with a layout's sizes; what the new sizes make void goes back to its default.

    Raises:
        ConfigError: lists everything that is impossible in the layout.
    """
    tensor, pipeline = layout.tensor_parallel_size, layout.pipeline_parallel_size
    problems = [
        Problem(f"--{name}", f"{size} is not a number of ranks; give 1 or more")
        for name, size in (
            ("tensor-parallel-size", tensor),
            ("pipeline-parallel-size", pipeline),
            ("data-parallel-size", layout.data_parallel_size),
        )
        if size < 1
    ]
    if not 0 <= layout.zero_stage <= 3:
        problems.append(Problem("--zero-stage", f"{layout.zero_stage}; give 0, 1, 2 or 3"))
    raise_problems(f"layout {layout}", problems)
    parallel = config.parallel
    by_hand = parallel.pipeline_layers if parallel.pipeline_parallel_size == pipeline else None
    changed = parallel.model_copy(
        update={
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": pipeline,
            "sequence_parallel": parallel.sequence_parallel and tensor > 1,
            "pipeline_layers": by_hand,
        }
    )
    result = config.model_copy(update={"parallel": changed})
    raise_problems(f"layout {layout}", list(layout_problems(result, None, layout.zero_stage)))
    return result


def plan_pieces(config: RunConfig, shapes: Shapes, layout: Layout) -> Iterator[tuple[int, list[PlannedPiece]]]:
    """Every rank with the pieces that it will hold and no other writes; each element of the model is in one of them.

    Args:
        config: the recipe, `model.vocab_size` set.
        shapes: of all parameters of the checkpoint.
        layout: of the ranks.

    Raises:
        CheckpointError: the parameters are not those of the recipe's model.
        ConfigError: a parameter cannot be split that far.
    """
    kernels = choose_kernels(KernelsConfig(), "cpu", torch.float32, False)
    descriptions = build_layer_list(config.model, objective_terms(config.objective), kernels)
    with torch.device("meta"):
        module = LayerSequence(descriptions)
    expected = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    check_parameters(shapes, expected, "the parameters are not those of the recipe's model")
    multiple = config.parallel.vocab_multiple
    for stage, names in enumerate(_stage_names(config, descriptions, expected, layout)):
        for tensor in range(layout.tensor_parallel_size):
            held = [_hold(name, shapes[name], layout, tensor, multiple, duplicate) for name, duplicate in names]
            for data, pieces in enumerate(_cut(held, layout)):
                yield layout.rank(stage, data, tensor), [part for piece in pieces for part in _parts(piece)]


def _stage_names(
    config: RunConfig, descriptions: Sequence[LayerDescription], shapes: Shapes, layout: Layout
) -> list[list[tuple[str, bool]]]:
    """Names of each stage's parameters in the order of its layers, and whether an earlier stage writes them."""
    if layout.pipeline_parallel_size == 1:
        return [[(name, False) for name in shapes]]
    if config.parallel.pipeline_layers is not None:
        bounds = bounds_of_counts(descriptions, config.parallel.pipeline_layers)
    else:
        # Measured times are known to the run alone; parameters are the nearest guess.
        uniform = config.parallel.pipeline_partition == "uniform"
        costs = block_costs(descriptions) if uniform else parameter_costs(descriptions, shapes)
        bounds = stage_bounds(descriptions, costs, layout.pipeline_parallel_size)
    stages: list[list[tuple[str, bool]]] = []
    seen: set[str] = set()
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        layers = dict.fromkeys(description.name for description in descriptions[start:stop])
        names = [name for layer in layers for name in shapes if name.startswith(f"{layer}.")]
        stages.append([(name, name in seen) for name in names])
        seen.update(names)
    return stages


def _hold(name: str, shape: tuple[int, ...], layout: Layout, rank: int, multiple: int, duplicate: bool) -> _Held:
    size = layout.tensor_parallel_size
    shard = shard_of(name, shape, size, rank, multiple)
    elements = shard.num_elements
    axis = split_axis(name)
    if size > 1 and axis == "vocabulary":
        elements = vocabulary_rows_per_rank(shape[0], size, multiple) * shard.num_columns
    return _Held(name, shard, elements, duplicate or (rank > 0 and axis is None))


def _cut(held: Sequence[_Held], layout: Layout) -> list[list[PlannedPiece]]:
    """One model's parameters over its data-parallel ranks."""
    ranks = layout.data_parallel_size
    pieces: list[list[PlannedPiece]] = [[] for _ in range(ranks)]
    if layout.zero_stage == 0:
        for index, one in enumerate(held):
            _add(pieces[index % ranks], one, 0, one.num_elements)
    elif layout.zero_stage == 3:
        for one in held:
            width = -(-one.num_elements // ranks)
            for data in range(ranks):
                _add(pieces[data], one, data * width, min((data + 1) * width, one.num_elements))
    else:
        matrices = [one for one in held if len(one.shard.shape) > 1]
        _cut_flat(matrices, pieces)
        _cut_flat([one for one in held if len(one.shard.shape) <= 1], pieces)
    return pieces


def _cut_flat(group: Sequence[_Held], pieces: list[list[PlannedPiece]]) -> None:
    """A parameter group one after the other, padded at the end, in equal partitions."""
    ranks = len(pieces)
    total = sum(one.num_elements for one in group)
    width = -(-total // (ALIGNMENT * ranks)) * ALIGNMENT
    begin = 0
    for one in group:
        end = begin + one.num_elements
        for data in range(begin // max(1, width), ranks):
            if data * width >= end:
                break
            _add(pieces[data], one, max(begin, data * width) - begin, min(end, (data + 1) * width) - begin)
        begin = end


def _add(pieces: list[PlannedPiece], one: _Held, start: int, stop: int) -> None:
    """The range without rows of padding, which come last, unless another rank writes it."""
    stop = min(stop, one.shard.num_elements)
    if start < stop and not one.duplicate:
        pieces.append(PlannedPiece(one.name, one.shard, start, stop - start))


def _parts(piece: PlannedPiece) -> Iterator[PlannedPiece]:
    stop = piece.start + piece.length
    for start in range(piece.start, stop, MAX_PIECE_ELEMENTS):
        yield PlannedPiece(piece.name, piece.shard, start, min(MAX_PIECE_ELEMENTS, stop - start))
