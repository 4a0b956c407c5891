"""Section and layers of the toy families.

Shape letters: b rows, s positions of input_ids, t of decoder_ids, h width, n heads of this rank, d size of a head, v
vocabulary of this rank.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.kernels.dropout import keyed_uniform
from ctxlm_ds.models.parts.embeddings import WordEmbeddings, WordTable
from ctxlm_ds.models.parts.norms import LayerNorm
from ctxlm_ds.models.spec import ModelBuild
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import first_largest, label_losses
from ctxlm_ds.parallel.layers import column_parallel_linear, replicated_linear, row_parallel_linear
from ctxlm_ds.parallel.parameters import ONES, Normal, ParameterFacts, declare
from ctxlm_ds.parallel.placement import COLUMNS
from ctxlm_ds.recipe.sections import ModelSection

WIDTH, HEADS, VOCAB, REACH = 8, 2, 32, 3
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


def word_table(build: ModelBuild, **more: Any) -> WordTable:
    return WordTable(VOCAB, WIDTH, INIT, build, **more)


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

    def forward(self, hidden: Tensor, memory: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map hidden to the same shape; bias [n, t, s] is added to the scores."""
        if self.label is not None:
            FORWARDS[self.label] += 1
        query = self.query(self.norm(hidden)).unflatten(-1, (self.heads, -1))
        key, value = self.both(self.norm(memory)).unflatten(-1, (2, self.heads, -1)).unbind(2)
        scores = torch.einsum("btnd,bsnd->bnts", query, key)
        scores = scores if bias is None else scores + bias
        return hidden + self.output(torch.einsum("bnts,bsnd->btnd", scores.softmax(-1), value).flatten(2))


class DecoderBlock(nn.Module):
    """Attends to itself with a bias, then to the encoder's output."""

    def __init__(self, kernels: KernelSet, parallel: ParallelContext) -> None:
        super().__init__()
        self.own, self.cross = Attend(kernels, parallel), Attend(kernels, parallel)

    def forward(self, hidden: Tensor, bias: Tensor, memory: Tensor) -> Tensor:
        return self.cross(self.own(hidden, hidden, bias), memory)


class RelativeBias(nn.Module):
    """A learnt number for each distance and head; each rank holds its heads."""

    def __init__(self, parallel: ParallelContext) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * REACH + 1, HEADS // parallel.size))
        declare(self, weight=ParameterFacts(INIT, decays=False, split=COLUMNS))
        if parallel.size > 1:
            from ctxlm_ds.parallel.megatron import mark_split

            mark_split(self.weight, dim=1)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [b, s] to the bias [n, s, s] of their positions."""
        places = torch.arange(ids.shape[1], device=ids.device)
        distance = (places[:, None] - places[None, :]).clamp(-REACH, REACH) + REACH
        return self.weight[distance].permute(2, 0, 1)


class Exchange(nn.Module):
    """Two streams that read each other."""

    def __init__(self, kernels: KernelSet, parallel: ParallelContext, label: str) -> None:
        super().__init__()
        self.left, self.right = Attend(kernels, parallel, label), Attend(kernels, parallel)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(left, right), self.right(right, left)


class ScaledWords(WordEmbeddings):
    """A table of which only the decoder reads one tensor."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        declare(self, scale=ParameterFacts(ONES, decays=False))

    def forward(self, x: Tensor, decode: bool = False, split_tokens: bool = False) -> Tensor:
        return super().forward(x * self.scale if decode else x, decode=decode, split_tokens=split_tokens)


class ChunkedWords(WordEmbeddings):
    """Compares hidden states with labels some tokens at a time, so that all logits are never held at once."""

    CHUNK = 7

    def forward(self, x: Tensor, labels: Tensor | None = None, **call: Any) -> Any:
        if labels is None:
            return super().forward(x, **call)

        def compare(hidden: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
            return label_losses(self.decode(hidden), label, self.parallel)

        pieces = zip(x.flatten(0, 1).split(self.CHUNK), labels.flatten().split(self.CHUNK), strict=True)
        done = [checkpoint(compare, *piece, use_reentrant=False) for piece in pieces]
        losses, hits = (torch.cat(parts).view_as(labels) for parts in zip(*done, strict=True))
        return losses, hits


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


class Sampler(nn.Module):
    """Replaces the labelled tokens by words drawn from the generator's distribution (Gumbel-max)."""

    def __init__(self, parallel: ParallelContext) -> None:
        super().__init__()
        self.parallel = parallel

    def forward(self, logits: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Map logits [b, s, v], ids and labels [b, s] to the new ids, and 1 for each that differs."""
        flat, parallel = logits.detach().flatten(0, 1), self.parallel
        tokens, words = (torch.arange(size, device=ids.device) for size in flat.shape)
        places = tokens[:, None] * VOCAB + words[None, :] + parallel.rank * flat.shape[1]
        noise = keyed_uniform(places, parallel.dropout.key(0, flat))
        drawn = first_largest(flat.float() - noise.log().neg().log(), parallel).view_as(ids)
        new = torch.where(labels != IGNORE_LABEL, drawn, ids)
        return new, (new != ids).long()


class Score(nn.Module):
    """One logit a position."""

    def __init__(self, kernels: KernelSet) -> None:
        super().__init__()
        self.line = replicated_linear(WIDTH, 1, INIT, kernels)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.line(hidden).squeeze(-1)


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
