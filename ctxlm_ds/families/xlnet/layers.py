"""XLNet (Yang 2019) as a list of layers: the words of both streams, what each query sees, the blocks, the decoder.

Shape letters as in attention.py: b rows, s positions, p slots, q = s + p queries, m positions of the memory, k = m + s
keys, h width, v vocabulary of this rank.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctxlm_ds.families.xlnet.attention import LayerSettings, XlnetLayer
from ctxlm_ds.families.xlnet.config import XlnetSection
from ctxlm_ds.kernels.attention_spec import AttentionSpec
from ctxlm_ds.kernels.dropout import keyed_row_dropout
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.embeddings import VocabularyBias, WordTable
from ctxlm_ds.models.parts.transformer import BlockSettings
from ctxlm_ds.models.spec import ModelBuild
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.layers import EMBEDDINGS, HiddenDropout
from ctxlm_ds.parallel.mappings import gather_tokens, own_tokens, share_parameters
from ctxlm_ds.parallel.parameters import Normal, ParameterFacts, Uniform, declare

SLOTS = "target_positions"
PLACES = ("distances", "hidden_keys", "others")
POSITION_BASE = 10_000.0


def xlnet_layers(model: XlnetSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers that write permuted_logits [b, p, v]."""
    assert model.vocab_size is not None
    block = _settings(model)
    words = WordTable(model.vocab_size, model.hidden_size, block.init, build)
    places = LayerDescription(
        "places", Places, ("ranks", "token_type_ids", "sequence_ids", "directions", SLOTS), PLACES,
        {"model": model, "build": build}, tie_key="places", no_gradient=frozenset(PLACES), once=True,
    )  # fmt: skip
    ids = ("stream_ids",)
    bias = {"vocab_size": model.vocab_size, "parallel": build.parallel}
    return [
        LayerDescription("stream_ids", StreamIds, ("input_ids", SLOTS), ids, no_gradient=frozenset(ids)),
        words.look_up("stream_ids"),
        LayerDescription(
            "stream_inputs", StreamInputs, ("hidden", SLOTS, *ids), ("hidden",), {"block": block, "build": build}
        ),
        *(
            layer
            for number in range(model.num_layers)
            for layer in (places, _block(number, LayerSettings(block, model.mem_len), build))
        ),
        LayerDescription(
            "query_stream", QueryStream, ("hidden", SLOTS, "sequence_ids"), ("predicted_hidden",),
            {"p": model.hidden_dropout, "build": build},
        ),
        words.decode("predicted_hidden", "permuted_scores"),
        LayerDescription("lm_bias", VocabularyBias, ("permuted_scores",), ("permuted_logits",), bias),
    ]  # fmt: skip


def _block(number: int, settings: LayerSettings, build: ModelBuild) -> LayerDescription:
    memory = (f"memory.{number}",) if settings.mem_len else ()
    return LayerDescription(
        f"layer.{number}", XlnetLayer, ("hidden", *PLACES, SLOTS, *memory), ("hidden", *memory),
        {"settings": settings, "build": build}, carries=frozenset(memory),
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
        """Map fields [b, s], directions [b, 1] and slots [b, p] to distances, hidden_keys and others (attention.py)."""
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
