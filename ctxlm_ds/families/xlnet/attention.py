"""XLNet's layer: attention of both streams by relative positions and segments, and a feed-forward layer.

The two streams are one sequence: the s positions of the content stream, then the p slots of the query stream. Both have
the same weights, and both attend to the content and to what earlier rows left (the memory).

Shape letters: b rows, s positions, p slots, q = s + p queries, m positions of the memory, k = m + s keys, h width, n
heads of this rank, d size of a head. Under sequence parallelism hidden states are this rank's tokens [b·q / ranks, h].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctxlm_ds.kernels.dropout import keyed_row_dropout
from ctxlm_ds.models.parts.norms import LayerNorm
from ctxlm_ds.models.parts.transformer import BlockSettings, FeedForward
from ctxlm_ds.models.spec import ModelBuild
from ctxlm_ds.parallel.layers import (
    ATTENTION,
    ATTENTION_OUTPUT,
    MLP_OUTPUT,
    HiddenDropout,
    column_parallel_linear,
    row_parallel_linear,
)
from ctxlm_ds.parallel.mappings import gather_tokens
from ctxlm_ds.parallel.parameters import Init, ParameterFacts, declare
from ctxlm_ds.parallel.placement import COLUMNS, ROWS, Split

HIDDEN_SCORE = -1e30
"""Score of what a query does not see. It is finite: a query that sees nothing attends to everything equally."""


@dataclass(frozen=True)
class LayerSettings:
    """Settings of a layer."""

    block: BlockSettings
    mem_len: int
    """m of the next step."""


class RelativeAttention(nn.Module):
    """Attention with relative positions (Dai 2019, section 3.3) and relative segments (Yang 2019, section 2.6).

    The score of a query and a key is the product of the query's vector with the key's, with that of their distance, and
    with that of whether they are of one segment, with another learnt bias of the query in each. The vector of one
    segment counts as 0 and that of two as the difference of both, which is the same after the softmax.
    """

    def __init__(self, settings: LayerSettings, build: ModelBuild) -> None:
        super().__init__()
        block, kernels, parallel = settings.block, build.kernels, build.parallel
        width, init = block.hidden_size, block.init
        # Reads gathered tokens, because keys are those of the memory too.
        whole = replace(parallel, sequence_parallel=False)
        self.query = column_parallel_linear(width, width, init, kernels, whole, bias=False)
        self.key_value = column_parallel_linear(
            width, 2 * width, init, kernels, whole, blocks=(width, width), bias=False
        )
        self.distance = column_parallel_linear(width, width, init, kernels, whole, bias=False)
        self.output = row_parallel_linear(width, width, init, kernels, parallel, bias=False)
        self.num_heads, self.all_heads = block.num_heads // parallel.size, block.num_heads
        self.first_head = self.num_heads * parallel.rank
        size = width // block.num_heads
        shape = (self.num_heads, size)
        self.content_bias, self.distance_bias, self.segment_bias = (nn.Parameter(torch.empty(shape)) for _ in range(3))
        self.segments = nn.Parameter(torch.empty(2, self.num_heads * size))
        biases = dict.fromkeys(("content_bias", "distance_bias", "segment_bias"), self._facts(init, ROWS, decays=False))
        declare(self, **biases, segments=self._facts(init, COLUMNS, decays=True))
        if parallel.size > 1:
            from ctxlm_ds.parallel.megatron import mark_split

            for name in biases:
                mark_split(getattr(self, name), dim=0)
            mark_split(self.segments, dim=1)
        self.parallel, self.dropout, self.scale = parallel, block.attention.dropout, size**-0.5

    @staticmethod
    def _facts(init: Init, split: Split, decays: bool) -> ParameterFacts:
        return ParameterFacts(init, decays=decays, split=split)

    def forward(
        self, tokens: Tensor, memory: Tensor | None, distances: Tensor, hidden_keys: Tensor, others: Tensor,
        slots: Tensor,
    ) -> Tensor:  # fmt: skip
        """Map tokens [b, q, h] to [b, q, h], or to this rank's tokens.

        Args:
            tokens: both streams, all positions.
            memory: [b, m, h]; None for none.
            distances: vectors [b, k + s - 1, h] of the distances of a query and a key, from k - 1 down to 1 - s.
            hidden_keys: [b, q, k] True if a query does not see a key.
            others: [b, q, k] True if query and key are of different segments.
            slots: [b, p] positions of the query stream, s in a slot without a prediction.
        """
        length = hidden_keys.shape[1] - slots.shape[1]
        content = tokens[:, :length]
        source = content if memory is None else torch.cat([memory, content], dim=1)
        query = self._heads(self.query(tokens))
        key, value = (self._heads(x) for x in self.key_value(source).chunk(2, dim=-1))
        far = self._heads(self.distance(distances))
        scores = (query + self.content_bias[:, None]) @ key.transpose(-1, -2)
        scores = scores + self._by_distance(query + self.distance_bias[:, None], far, slots, length)
        scores = scores + self._by_segment(query) * others[:, None]
        lowest = max(HIDDEN_SCORE, torch.finfo(scores.dtype).min)
        scores = (scores * self.scale).masked_fill(hidden_keys[:, None], lowest)
        dtype = torch.promote_types(scores.dtype, torch.float32)
        context = self._dropped(torch.softmax(scores, dim=-1, dtype=dtype).to(value.dtype)) @ value
        context = context.transpose(1, 2).flatten(2)
        used = F.pad((slots < length)[..., None], (0, 0, length, 0), value=True)
        return self.output(context * used)

    def _heads(self, x: Tensor) -> Tensor:
        """Map [b, t, n·d] to [b, n, t, d]."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _by_distance(self, query: Tensor, far: Tensor, slots: Tensor, length: int) -> Tensor:
        """Return the products [b, n, q, k] of each query with the distance of each key."""
        products = query @ far.transpose(-1, -2)
        keys = far.shape[2] - length + 1
        of_content, of_slots = products.split((length, products.shape[2] - length), dim=2)
        # The products of a query at place i with keys from 0 on begin at column s - 1 - i.
        begins = length - 1 - slots.clamp(max=length - 1)
        columns = begins[:, None, :, None] + torch.arange(keys, device=slots.device)
        picked = of_slots.gather(-1, columns.expand(-1, self.num_heads, -1, -1))
        return torch.cat([_shifted(of_content, keys), picked], dim=2)

    def _by_segment(self, query: Tensor) -> Tensor:
        """Return the product [b, n, q, 1] of each query with the vector of another segment."""
        other = (self.segments[1] - self.segments[0]).view(self.num_heads, -1, 1)
        return (query + self.segment_bias[:, None]) @ other

    def _dropped(self, probabilities: Tensor) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return probabilities
        rows, heads, queries, _ = probabilities.shape
        device = probabilities.device
        numbers = torch.arange(rows, device=device)[:, None] * self.all_heads + self.first_head
        numbers = (numbers + torch.arange(heads, device=device))[..., None] * queries
        numbers = numbers + torch.arange(queries, device=device)
        key = self.parallel.dropout.key(ATTENTION, probabilities)
        return keyed_row_dropout(probabilities, self.dropout, key, numbers)


def _shifted(products: Tensor, keys: int) -> Tensor:
    """Return columns s - 1 - i to s - 2 - i + k of each row i of products [b, n, s, k + s - 1] (Dai 2019, app. B)."""
    rows, columns = products.shape[-2:]
    if rows == 1:
        return products
    # Rows of one column less, from the first row's beginning on, begin one column earlier each.
    flat = products.flatten(-2)[..., rows - 1 : rows - 1 + rows * (columns - 1)]
    return flat.unflatten(-1, (rows, columns - 1))[..., :keys]


class XlnetLayer(nn.Module):
    """One layer: attention and feed-forward, each with dropout, a residual connection and LayerNorm after it."""

    def __init__(self, settings: LayerSettings, build: ModelBuild) -> None:
        super().__init__()
        block, kernels, self.parallel = settings.block, build.kernels, build.parallel
        width, eps = block.hidden_size, block.norm_eps
        self.attention = RelativeAttention(settings, build)
        self.attention_layer_norm = LayerNorm(width, eps, kernels, self.parallel)
        self.mlp = FeedForward(block, build)
        self.mlp_layer_norm = LayerNorm(width, eps, kernels, self.parallel)
        self.dropout = HiddenDropout(block.hidden_dropout, kernels, self.parallel)
        self.mem_len = settings.mem_len

    def forward(
        self, hidden: Tensor, distances: Tensor, hidden_keys: Tensor, others: Tensor, slots: Tensor,
        memory: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Map hidden to the same shape and, if the layer has a memory, the memory to that of the next step.

        The arguments are those of RelativeAttention, for a memory of mem_len. A memory that no step has written is 0 in
        training, so that shapes are constant; in evaluation there is none, and it grows to mem_len.
        """
        shape = hidden_keys.shape[:2]
        splits = self.parallel.splits_tokens
        tokens = gather_tokens(hidden, self.parallel).unflatten(0, shape) if splits else hidden
        length = hidden_keys.shape[1] - slots.shape[1]
        if self.mem_len and self.training and memory is None:
            memory = tokens.new_zeros(shape[0], self.mem_len, tokens.shape[-1])
        keys = length + (0 if memory is None else memory.shape[1])
        places = distances[:, 1 - length - keys :], hidden_keys[..., -keys:], others[..., -keys:]
        attended = self.attention(tokens, memory, *places, slots)
        hidden_after = self.attention_layer_norm(hidden + self.dropout(attended, ATTENTION_OUTPUT))
        out = self.mlp_layer_norm(hidden_after + self.dropout(self.mlp(hidden_after), MLP_OUTPUT))
        if not self.mem_len:
            return out
        # The next row begins after the first half of this one.
        half = tokens[:, : length // 2].detach()
        kept = (half if memory is None else torch.cat([memory, half], dim=1))[:, -self.mem_len :]
        return out, kept.clone()  # a view would keep the complete tensor until the next step
