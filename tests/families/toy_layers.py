"""Toy families, each the smallest that needs one kind of room: their section, layers, and lists of layers.

Shape letters: b rows, s positions of input_ids, t of decoder_ids, h width, n heads of this rank, d size of a head, v
vocabulary of this rank.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.embeddings import WordTable
from ctxlm_ds.models.parts.norms import LayerNorm
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.layers import VocabParallelEmbedding, column_parallel_linear, row_parallel_linear
from ctxlm_ds.parallel.parameters import ONES, Normal, ParameterFacts, declare
from ctxlm_ds.recipe.sections import ModelSection

WIDTH, HEADS, VOCAB = 8, 2, 32
INIT = Normal(0.3)
FORWARDS: Counter[str] = Counter()
"""Forward calls of the layers that count them, by label."""


class ToySection(ModelSection):
    """A toy's settings."""

    vocab_size: int = VOCAB
    hidden_size: int = WIDTH

    @property
    def num_blocks(self) -> int:
        return 4

    @property
    def drops(self) -> bool:
        return True  # it has keys to draw with


# Layers.


class Attend(nn.Module):
    """Adds what `hidden` [b, t, h] finds in `memory` [b, s, h]; each rank computes its heads."""

    def __init__(self, kernels: KernelSet, parallel: ParallelContext, label: str | None = None) -> None:
        super().__init__()
        self.heads, self.label = HEADS // parallel.size, label
        self.norm = LayerNorm(WIDTH, 1e-5, kernels)
        self.query = column_parallel_linear(WIDTH, WIDTH, INIT, kernels, parallel)
        self.both = column_parallel_linear(WIDTH, 2 * WIDTH, INIT, kernels, parallel, blocks=(WIDTH, WIDTH))
        self.output = row_parallel_linear(WIDTH, WIDTH, INIT, kernels, parallel)

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        """Map hidden to the same shape."""
        if self.label is not None:
            FORWARDS[self.label] += 1
        query = self.query(self.norm(hidden)).unflatten(-1, (self.heads, -1))
        key, value = self.both(self.norm(memory)).unflatten(-1, (2, self.heads, -1)).unbind(2)
        scores = torch.einsum("btnd,bsnd->bnts", query, key)
        return hidden + self.output(torch.einsum("bnts,bsnd->btnd", scores.softmax(-1), value).flatten(2))


class Exchange(nn.Module):
    """Two streams that read each other."""

    def __init__(self, kernels: KernelSet, parallel: ParallelContext, label: str) -> None:
        super().__init__()
        self.left, self.right = Attend(kernels, parallel, label), Attend(kernels, parallel)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(left, right), self.right(right, left)


class ScaledWords(VocabParallelEmbedding):
    """A table of which only the decoder reads one tensor."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        declare(self, scale=ParameterFacts(ONES, decays=False))

    def forward(self, x: Tensor, decode: bool = False, split_tokens: bool = False) -> Tensor:
        return super().forward(x * self.scale if decode else x, decode=decode, split_tokens=split_tokens)


class Facts(nn.Module):
    """Writes tensors without a gradient: floating of two types, boolean, integer."""

    def forward(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        return (ids % 5).float()[..., None] / 5, hidden * 2, ids > VOCAB // 2, (ids % WIDTH).int()


class Gated(nn.Module):
    """A block that reads tensors without a gradient."""

    def __init__(self, kernels: KernelSet, parallel: ParallelContext) -> None:
        super().__init__()
        self.mix = Attend(kernels, parallel)

    def forward(self, hidden: Tensor, share: Tensor, first: Tensor, large: Tensor, place: Tensor) -> Tensor:
        gated = hidden * share.to(hidden.dtype) + first * large[..., None]
        return self.mix(gated + F.one_hot(place.long(), WIDTH), hidden)


class Recurrent(nn.Module):
    """Reads a lane of text from left to right and goes on in the next step where it stopped."""

    def __init__(self, kernels: KernelSet, parallel: ParallelContext) -> None:
        super().__init__()
        self.up = column_parallel_linear(WIDTH, 2 * WIDTH, INIT, kernels, parallel)
        self.down = row_parallel_linear(2 * WIDTH, WIDTH, INIT, kernels, parallel)

    def forward(self, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map hidden [b, s, h] and the state [b, h] to the same."""
        state = torch.zeros_like(hidden[:, 0]) if state is None else state
        states = []
        for x in hidden.unbind(1):
            state = torch.tanh(self.down(torch.tanh(self.up(x + state))))
            states.append(state)
        return hidden + torch.stack(states, 1), state


# Lists of layers.


def blocks(
    factory: type[nn.Module], streams: tuple[str, ...], build: ModelBuild, fields: tuple[str, ...] = ()
) -> list[LayerDescription]:
    """Four blocks that read and write the streams and read the fields."""
    kwargs = {"kernels": build.kernels, "parallel": build.parallel}
    return [
        LayerDescription(
            f"block.{index}", factory, (*streams, *fields), streams, kwargs, block=True, recompute=build.recompute
        )  # fmt: skip
        for index in range(4)
    ]


def half_used(section: ToySection, build: ModelBuild) -> list[LayerDescription]:
    """The first stage holds a tensor of a tie that only the last one uses."""
    table = WordTable(VOCAB, WIDTH, INIT, build, layer=ScaledWords)
    attends = [replace(block, reads=("hidden", "hidden")) for block in blocks(Attend, ("hidden",), build)]
    return [table.look_up(), *attends, table.decode("hidden", "logits")]


def two_streams(section: ToySection, build: ModelBuild) -> list[LayerDescription]:
    """Two floating tensors leave each stage."""
    table = WordTable(VOCAB, WIDTH, INIT, build)
    exchanges = [
        replace(block, kwargs={**block.kwargs, "label": block.name.removeprefix("block.")})
        for block in blocks(Exchange, ("left", "right"), build)
    ]
    return [
        table.look_up(into="left"), table.look_up("decoder_ids", "right"), *exchanges,
        table.decode("left", "logits"), table.decode("right", "decoder_logits"),
    ]  # fmt: skip


def without_gradient(section: ToySection, build: ModelBuild) -> list[LayerDescription]:
    """Tensors of several types without a gradient cross the stages."""
    table, names = WordTable(VOCAB, WIDTH, INIT, build), ("share", "first", "large", "place")
    facts = LayerDescription("facts", Facts, ("input_ids", "hidden"), names, no_gradient=frozenset(names))
    return [table.look_up(), facts, *blocks(Gated, ("hidden",), build, names), table.decode("hidden", "logits")]


def lanes(section: ToySection, build: ModelBuild) -> list[LayerDescription]:
    """Each block goes on from what it wrote in the step before."""
    table = WordTable(VOCAB, WIDTH, INIT, build)
    states = [f"state.{index}" for index in range(4)]
    recurrent = [
        replace(block, reads=("hidden", state), writes=("hidden", state), carries=frozenset({state}))
        for block, state in zip(blocks(Recurrent, ("hidden",), build), states, strict=True)
    ]
    return [table.look_up(), *recurrent, table.decode("hidden", "logits")]
