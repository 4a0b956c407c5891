"""XLNet (Yang 2019) as a list of layers: the words of both streams, what each query sees, the blocks, the decoder.

The two streams are one sequence: the s positions of the content stream, then the p slots of the query stream. Both have
the same weights, and both attend to the content and to what earlier rows left (the memory).

Shape letters: b rows, s positions, p slots, q = s + p queries, m positions of the memory, k = m + s keys, h width, n
heads of this rank, d size of a head, v vocabulary of this rank. Under sequence parallelism hidden states are this
rank's tokens [b·q / ranks, h].
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctxlm_ds.families.xlnet.config import XlnetSection
from ctxlm_ds.kernels.attention_spec import AttentionSpec, ProbabilityKeys, probability_dropout
from ctxlm_ds.kernels.dropout import keyed_row_dropout
from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.embeddings import WordTable
from ctxlm_ds.models.parts.norms import LayerNorm
from ctxlm_ds.models.parts.transformer import BlockSettings, FeedForward
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.layers import (
    ATTENTION,
    ATTENTION_OUTPUT,
    EMBEDDINGS,
    MLP_OUTPUT,
    HiddenDropout,
    column_parallel_linear,
    declare_split,
    row_parallel_linear,
)
from ctxlm_ds.parallel.mappings import gather_tokens, own_tokens, share_parameters
from ctxlm_ds.parallel.parameters import Normal, ParameterFacts, Uniform, declare
from ctxlm_ds.parallel.placement import COLUMNS, ROWS

HIDDEN_SCORE = -1e30
"""Score of what a query does not see. It is finite: a query that sees nothing attends to everything equally."""


class RelativeAttention(nn.Module):
    """Attention with relative positions (Dai 2019, section 3.3) and relative segments (Yang 2019, section 2.6).

    The score of a query and a key is the product of the query's vector with the key's, with that of their distance, and
    with that of whether they are of one segment, with another learnt bias of the query in each. The vector of one
    segment counts as 0 and that of two as the difference of both, which is the same after the softmax.
    """

    def __init__(self, block: BlockSettings, build: ModelBuild) -> None:
        super().__init__()
        kernels, parallel, width, init = build.kernels, build.parallel, block.hidden_size, block.init
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
        of_bias = ParameterFacts(init, decays=False, split=ROWS)
        biases = dict.fromkeys(("content_bias", "distance_bias", "segment_bias"), of_bias)
        declare_split(self, parallel, **biases, segments=ParameterFacts(init, decays=True, split=COLUMNS))
        self.parallel, self.dropout, self.scale = parallel, block.attention.dropout, size**-0.5

    def forward(
        self, tokens: Tensor, memory: Tensor | None, distances: Tensor, hidden_keys: Tensor, others: Tensor,
        slots: Tensor,
    ) -> Tensor:  # fmt: skip
        """Map tokens [b, q, h] of both streams to [b, q, h], or to this rank's tokens.

        `memory` is [b, m, h]. `distances` are the vectors [b, k + s - 1, h] of the distances of a query and a key, from
        k - 1 down to 1 - s. `hidden_keys` and `others` [b, q, k] are True if a query does not see a key, and if both
        are of different segments. `slots` are the positions [b, p] of the query stream, s in a slot without a
        prediction.
        """
        length = hidden_keys.shape[1] - slots.shape[1]
        content = tokens[:, :length]
        source = content if memory is None else torch.cat([memory, content], dim=1)
        query = self._heads(self.query(tokens))
        key, value = (self._heads(x) for x in self.key_value(source).chunk(2, dim=-1))
        far = self._heads(self.distance(distances))
        scores = (query + self.content_bias[:, None]) @ key.transpose(-1, -2)
        scores = scores + self._by_distance(query + self.distance_bias[:, None], far, slots, length)
        other_segment = (self.segments[1] - self.segments[0]).view(self.num_heads, -1, 1)
        scores = scores + (query + self.segment_bias[:, None]) @ other_segment * others[:, None]
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

    def _dropped(self, probabilities: Tensor) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return probabilities
        key = self.parallel.dropout.key(ATTENTION, probabilities)
        keys = ProbabilityKeys(key, self.first_head, self.all_heads)
        return probability_dropout(probabilities, self.dropout, keys)


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

    def __init__(self, block: BlockSettings, mem_len: int, build: ModelBuild) -> None:
        super().__init__()
        kernels, self.parallel = build.kernels, build.parallel
        width, eps = block.hidden_size, block.norm_eps
        self.attention = RelativeAttention(block, build)
        self.attention_layer_norm = LayerNorm(width, eps, kernels, self.parallel)
        self.mlp = FeedForward(block, build)
        self.mlp_layer_norm = LayerNorm(width, eps, kernels, self.parallel)
        self.dropout = HiddenDropout(block.hidden_dropout, kernels, self.parallel)
        self.mem_len = mem_len

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
        hidden = self.attention_layer_norm(attended, hidden, drop=self.dropout.of(attended, ATTENTION_OUTPUT))
        found = self.mlp(hidden)
        out = self.mlp_layer_norm(found, hidden, drop=self.dropout.of(found, MLP_OUTPUT))
        if not self.mem_len:
            return out
        # The next row begins after the first half of this one.
        half = tokens[:, : length // 2].detach()
        kept = (half if memory is None else torch.cat([memory, half], dim=1))[:, -self.mem_len :]
        return out, kept.clone()  # a view would keep the complete tensor until the next step


SLOTS = "target_positions"
PLACES = ("distances", "hidden_keys", "others")
POSITION_BASE = 10_000.0


def xlnet_layers(model: XlnetSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers that write permuted_logits [b, p, v]."""
    block = _settings(model)
    words = WordTable(model.vocab_size, model.hidden_size, block.init, build)
    places = LayerDescription(
        "places", Places, ("ranks", "token_type_ids", "sequence_ids", "directions", SLOTS), PLACES,
        {"model": model, "build": build}, tie_key="places", no_gradient=frozenset(PLACES), once=True,
    )  # fmt: skip
    ids = ("stream_ids",)
    return [
        LayerDescription("stream_ids", StreamIds, ("input_ids", SLOTS), ids, no_gradient=frozenset(ids)),
        words.look_up("stream_ids"),
        LayerDescription(
            "stream_inputs", StreamInputs, ("hidden", SLOTS, *ids), ("hidden",), {"block": block, "build": build}
        ),
        *(
            layer
            for number in range(model.num_layers)
            for layer in (places, _block(number, block, model.mem_len, build))
        ),
        LayerDescription(
            "query_stream", QueryStream, ("hidden", SLOTS, "sequence_ids"), ("predicted_hidden",),
            {"p": model.hidden_dropout, "build": build},
        ),
        *words.decode_with_bias("predicted_hidden", "lm_bias", "permuted_logits"),
    ]  # fmt: skip


def _block(number: int, block: BlockSettings, mem_len: int, build: ModelBuild) -> LayerDescription:
    memory = (f"memory.{number}",) if mem_len else ()
    return LayerDescription(
        f"layer.{number}", XlnetLayer, ("hidden", *PLACES, SLOTS, *memory), ("hidden", *memory),
        {"block": block, "mem_len": mem_len, "build": build}, carries=frozenset(memory),
        recompute=build.recompute, compile=build.compile, block=True,
    )  # fmt: skip


def _settings(model: XlnetSection) -> BlockSettings:
    size = model.hidden_size // model.num_attention_heads
    init = Normal(model.initializer_range)
    return BlockSettings(
        hidden_size=model.hidden_size,
        num_heads=model.num_attention_heads,
        intermediate_size=model.intermediate_size,
        activation=model.hidden_activation,
        norm_eps=model.layer_norm_eps,
        hidden_dropout=model.hidden_dropout,
        attention=AttentionSpec(head_size=size, dropout=model.attention_dropout),
        pre_layer_norm=False,
        init=init,
        residual_init=init,
        inner_dropout=model.hidden_dropout,
    )


class StreamIds(nn.Module):
    """Makes places for the query stream behind the tokens, so that one look-up divides both streams among ranks."""

    def forward(self, input_ids: Tensor, slots: Tensor) -> Tensor:
        """Map input_ids [b, s] and slots [b, p] to ids [b, q], 0 in slots."""
        return F.pad(input_ids, (0, slots.shape[1]))


class StreamInputs(nn.Module):
    """The inputs of both streams: the words, and one learnt vector in every slot (Yang 2019, section 2.3)."""

    def __init__(self, block: BlockSettings, build: ModelBuild) -> None:
        super().__init__()
        width, self.parallel = block.hidden_size, build.parallel
        # A table of one row, as in the original, where it decays and has Glorot's distribution for [1, h].
        self.query = nn.Parameter(torch.empty(1, width))
        declare(self, query=ParameterFacts(Uniform(math.sqrt(6.0 / (1 + width))), decays=True))
        self.dropout = HiddenDropout(block.hidden_dropout, build.kernels, self.parallel)

    def forward(self, hidden: Tensor, slots: Tensor, stream_ids: Tensor) -> Tensor:
        """Map the vectors of stream_ids [b, q] to the inputs, both [b, q, h] or this rank's tokens of it."""
        length = stream_ids.shape[1] - slots.shape[1]
        in_slot = (torch.arange(stream_ids.shape[1], device=hidden.device) >= length).expand_as(stream_ids)
        if self.parallel.splits_tokens:
            in_slot = own_tokens(in_slot.flatten(), self.parallel)
        (query,) = share_parameters(self.parallel, self.query)
        return self.dropout(torch.where(in_slot[..., None], query[0].to(hidden.dtype), hidden), EMBEDDINGS)


class Places(nn.Module):
    """What depends on places only: distances, which keys a query sees, which are of its segment.

    A rank is the place of a token in the order of factorisation (objectives/permutation_lm.py). A position sees those
    whose rank is not above its own, a slot those whose rank is below that of its position; every query sees the memory.
    """

    def __init__(self, model: XlnetSection, build: ModelBuild) -> None:
        super().__init__()
        self.width, self.p, self.mem_len = model.hidden_size, model.hidden_dropout, model.mem_len
        self.parallel, self.shares_rows = build.parallel, build.shares_rows
        self.dtype = build.kernels.dtype

    def forward(
        self, ranks: Tensor, token_type_ids: Tensor, sequence_ids: Tensor, directions: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map fields [b, s], directions [b, 1] and slots [b, p] to what RelativeAttention reads of places."""
        memory, length = self.mem_len, ranks.shape[1]
        places = slots.clamp(max=length - 1)

        def of_queries(values: Tensor) -> Tensor:
            return torch.cat([values, values.gather(1, places)], dim=1)[..., None]

        limits = torch.cat([ranks, ranks.gather(1, places) - 1], dim=1)[..., None]
        hidden_keys = ranks[:, None] > limits
        if self.shares_rows:
            hidden_keys = hidden_keys | (of_queries(sequence_ids) != sequence_ids[:, None])
        others = of_queries(token_type_ids) != F.pad(token_type_ids, (memory, 0))[:, None]
        distances = self._vectors(length, directions)
        return self._dropped(distances), F.pad(hidden_keys, (memory, 0)), others

    def _vectors(self, length: int, directions: Tensor) -> Tensor:
        """Return the sines and cosines [b, k + s - 1, h] of the distances k - 1 to 1 - s, negative in rows backward."""
        device = directions.device
        distances = torch.arange(self.mem_len + length - 1, -length, -1, device=device, dtype=torch.float32)
        steps = torch.arange(0, self.width, 2, device=device, dtype=torch.float32) / self.width
        angles = distances[:, None] * (1.0 / torch.pow(POSITION_BASE, steps))
        sines = angles.sin() * (1 - 2 * directions)[..., None]
        return torch.cat([sines, angles.cos().expand_as(sines)], dim=-1).to(self.dtype)

    def _dropped(self, distances: Tensor) -> Tensor:
        """Drop elements of each row's vectors by the row, so that every stage of a pipeline drops the same."""
        if not self.training or self.p == 0.0:
            return distances
        rows, count, _ = distances.shape
        keys = self.parallel.dropout.row_keys(rows, distances)[:, None, None]
        return keyed_row_dropout(distances, self.p, keys, torch.arange(count, device=distances.device))


class QueryStream(nn.Module):
    """The query stream after the last layer, which every tensor-parallel rank computes completely."""

    def __init__(self, p: float, build: ModelBuild) -> None:
        super().__init__()
        self.parallel: ParallelContext = build.parallel
        self.dropout = HiddenDropout(p, build.kernels, replace(build.parallel, sequence_parallel=False))

    def forward(self, hidden: Tensor, slots: Tensor, sequence_ids: Tensor) -> Tensor:
        """Map hidden [b, q, h], or this rank's tokens of it, to the vectors [b, p, h] of the slots."""
        if self.parallel.splits_tokens:
            queries = sequence_ids.shape[1] + slots.shape[1]
            hidden = gather_tokens(hidden, self.parallel).unflatten(0, (-1, queries))
        return self.dropout(hidden[:, sequence_ids.shape[1] :], EMBEDDINGS)
