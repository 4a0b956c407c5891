"""Weights of a smaller model from some of the repeated layers of a larger one (`initialize_layers`)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from ctxlm_ds.console import logger
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.export.key_maps import Shape, WeightSource


class SelectedLayers(NamedTuple):
    """A source under the names of another model, with some of its repeated layers."""

    source: WeightSource
    theirs: Mapping[str, str]
    """Name in the other model -> name in the source."""

    def names(self) -> list[str]:
        return list(self.theirs)

    def shape(self, name: str) -> Shape:
        return self.source.shape(self.theirs[name])

    def read_full(self, name: str) -> torch.Tensor:
        return self.source.read_full(self.theirs[name])


def select_layers(
    source: WeightSource,
    blocks_there: Sequence[str],
    blocks_here: Sequence[str],
    wanted_names: Container[str],
    layers: Sequence[int] | Literal["spread"],
) -> SelectedLayers:
    """Give the source's parameters the names of another model.

    Args:
        source: the larger model.
        blocks_there: names of its repeated layers.
        blocks_here: names of those of the other model.
        wanted_names: names of all parameters of the other model; the source's further ones are left out.
        layers: numbers of the source's layers, from 0; `spread` takes the first, the last and equal steps between.

    Raises:
        CheckpointError: the numbers do not fit the models.
    """
    count, wanted = len(blocks_there), len(blocks_here)
    numbers = spread(count, wanted) if layers == "spread" else list(layers)
    if len(numbers) != wanted:
        raise CheckpointError(f"initialize_layers: {numbers} has {len(numbers)} layers, but the model has {wanted}")
    if max(numbers) >= count:
        raise CheckpointError(f"initialize_layers: {max(numbers)} is not one of the source's layers 0 to {count - 1}")
    logger.info("initialize_from: layers %s of %d", ", ".join(map(str, numbers)), count)
    theirs: dict[str, str] = {}
    prefixes = tuple(f"{block}." for block in blocks_there)
    for name in source.names():
        if not name.startswith(prefixes):
            theirs[name] = name
    for here, number in zip(blocks_here, numbers, strict=True):
        there = f"{blocks_there[number]}."
        for name in source.names():
            if name.startswith(there):
                theirs.setdefault(f"{here}.{name.removeprefix(there)}", name)
    return SelectedLayers(source, {here: there for here, there in theirs.items() if here in wanted_names})


def spread(count: int, wanted: int) -> list[int]:
    """Return `wanted` of `count` numbers, from the first to the last in equal steps: 0 2 4 7 9 11 for 6 of 12.

    Source: scripts/extract_distilbert.py of transformers' research projects (distillation).
    """
    if wanted == 1:
        return [0]
    return [int(index * (count - 1) / (wanted - 1) + 0.5) for index in range(wanted)]
