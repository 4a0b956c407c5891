"""The transformer layer: self-attention and feed-forward (gated or not), a norm after each or before.

Shape letters: b rows, s positions, h width, n heads of this rank, k of keys and values, d size of a head, m sequences
of a row. `hidden` is [b, s, h], or under sequence parallelism this rank's share of the flattened tokens
[b·s / ranks, h]. With context parallelism s are this rank's positions, but sequence_ids those of complete rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ctxlm_ds.kernels.attention_spec import AttentionCall, AttentionSpec, ProbabilityKeys, Sequences, reads_distances
from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.norms import LayerNorm, RMSNorm
from ctxlm_ds.models.parts.rotary import Rotary
from ctxlm_ds.parallel.layers import (
    ATTENTION,
    ATTENTION_OUTPUT,
    MLP_OUTPUT,
    HiddenDropout,
    InnerDropout,
    column_parallel_linear,
    row_parallel_linear,
)
from ctxlm_ds.parallel.mappings import to_heads, to_positions
from ctxlm_ds.parallel.parameters import Init, Normal

if TYPE_CHECKING:
    from ctxlm_ds.families.base import TransformerSection


@dataclass(frozen=True)
class BlockSettings:
    """Settings of a family's transformer layers."""

    hidden_size: int
    num_heads: int
    intermediate_size: int
    activation: str
    norm_eps: float
    hidden_dropout: float
    attention: AttentionSpec
    pre_layer_norm: bool
    """LayerNorm before attention and feed-forward instead of after."""
    init: Init
    residual_init: Init
    """Initial values of the matrices whose output is added to the residual stream."""
    mlp_dropout: float | None = None
    """Dropout of the feed-forward layer's output; None for hidden_dropout."""
    attention_norm: bool = True
    """LayerNorm of the attention's input; False in a first layer whose input is the output of a LayerNorm."""
    linear_bias: bool = True
    norm_bias: bool = True
    gated: bool = False
    """The activation of one half of the wide layer is a factor of the other half (Shazeer 2020)."""
    rotary: Rotary | None = None
    """Rotary positions of the attention."""
    num_key_value_heads: int | None = None
    """Heads of keys and values, which groups of query heads share (Ainslie 2023); None for num_heads."""
    rms_norm: bool = False
    """RMSNorm instead of LayerNorm."""
    query_init: Normal | None = None
    """Initial values of the matrix of the queries; None for init."""
    mlp_output_init: Init | None = None
    """Initial values of the second feed-forward matrix; None for residual_init."""
    inner_dropout: float = 0.0
    """Dropout between the two matrices of the feed-forward layer."""

    @property
    def qkv_init(self) -> Init:
        """Initial values of the matrices of queries, keys and values together."""
        if self.query_init is None:
            return self.init
        assert isinstance(self.init, Normal)
        factor = self.query_init.standard_deviation / self.init.standard_deviation
        return replace(self.init, row_factors=(factor, 1.0, 1.0))

    @property
    def attention_width(self) -> int:
        return self.num_heads * self.attention.head_size


def initial_weights(model: TransformerSection, standard_deviation: float | None = None) -> Normal:
    """Return the distribution of initial weights that a recipe asks for."""
    return Normal(standard_deviation or model.initializer_range, truncated=model.initializer == "truncated_normal")


def block_settings(
    model: TransformerSection,
    build: ModelBuild,
    pre_layer_norm: bool,
    causal: bool = False,
    scaled_residuals: bool = False,
) -> BlockSettings:
    """Read the settings of the transformer layers from a recipe.

    With `scaled_residuals` matrices whose output is added to the residual stream begin smaller by the root of the
    number of such additions, two per layer (Radford 2019, section 2.3).
    """
    residual_range = model.initializer_range / (math.sqrt(2 * model.num_layers) if scaled_residuals else 1.0)
    attention = AttentionSpec(
        head_size=model.hidden_size // model.num_attention_heads,
        causal=causal,
        dropout=model.attention_dropout,
        shares_rows=build.shares_rows,
    )
    return BlockSettings(
        hidden_size=model.hidden_size,
        num_heads=model.num_attention_heads,
        intermediate_size=model.intermediate_size,
        activation=model.hidden_activation,
        norm_eps=model.layer_norm_eps,
        hidden_dropout=model.hidden_dropout,
        attention=attention,
        pre_layer_norm=pre_layer_norm,
        init=initial_weights(model),
        residual_init=initial_weights(model, residual_range),
    )


def transformer_blocks(
    prefix: str, num_layers: int, settings: BlockSettings, build: ModelBuild
) -> list[LayerDescription]:
    """Describe the layers `prefix.0` to `prefix.<num_layers - 1>`, which rewrite `hidden`."""
    return [transformer_block(f"{prefix}.{index}", settings, build) for index in range(num_layers)]


def transformer_block(
    name: str, settings: BlockSettings, build: ModelBuild, bias: str | None = None
) -> LayerDescription:
    """Describe one layer, which rewrites `hidden`; `bias` names the tensor that its scores add, if any."""
    others = {} if bias is None else {"bias": bias}
    if settings.rotary is not None:
        others["position_ids"] = "position_ids"
    if settings.attention.ranked:
        others["ranks"] = "ranks"
    reads = ("hidden", "sequence_ids", "sequence_starts", *others.values())
    return block_description(name, TransformerLayer, reads, settings, build, {"names": tuple(others)})


def block_description(
    name: str,
    layer: type[TransformerLayer],
    reads: tuple[str, ...],
    settings: BlockSettings,
    build: ModelBuild,
    call: Mapping[str, Any],
) -> LayerDescription:
    """Describe a repeated layer that rewrites `hidden`; `call` are further arguments of its forward."""
    return LayerDescription(
        name, layer, reads, ("hidden",), {"settings": settings, "build": build}, call_kwargs=call,
        recompute=build.recompute, compile=build.compile, block=True,
    )  # fmt: skip


def final_layer_norm(
    settings: BlockSettings, build: ModelBuild, name: str = "final_layer_norm"
) -> list[LayerDescription]:
    """Describe the norm `name` after the last layer, which only a pre-LN model has."""
    layer = LayerDescription(name, make_norm, ("hidden",), ("hidden",), {"settings": settings, "build": build})
    return [layer] if settings.pre_layer_norm else []


def make_norm(settings: BlockSettings, build: ModelBuild) -> nn.Module:
    shared = settings.hidden_size, settings.norm_eps, build.kernels, build.parallel
    return RMSNorm(*shared) if settings.rms_norm else LayerNorm(*shared, bias=settings.norm_bias)


class Attention(nn.Module):
    """The heads of this rank, their kernel with its dropout, and the matrix after them."""

    def __init__(self, settings: BlockSettings, build: ModelBuild, spec: AttentionSpec, place: int) -> None:
        """Make kernel and matrix; `place` is the number of the dropout of probabilities in the layer."""
        super().__init__()
        kernels, parallel = build.kernels, build.parallel
        self.num_heads = settings.num_heads // parallel.size
        self.dropout = spec.dropout
        self.place = place
        self.output = row_parallel_linear(
            settings.attention_width, settings.hidden_size, settings.residual_init, kernels, parallel,
            settings.linear_bias,
        )  # fmt: skip
        self.kernel = kernels.attention(spec)
        self.streams = parallel.dropout
        self.draws_by_key = getattr(self.kernel, "DRAWS_BY_KEY", False)
        self.reads_distances = reads_distances(spec, self.kernel)
        self.parallel = parallel
        self.first_head = self.num_heads // parallel.context_size * parallel.head_share
        self.all_heads = settings.num_heads
        self.streams.uses_generators |= self.dropout > 0.0 and not self.draws_by_key

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, bias: Tensor | None = None
    ) -> Tensor:
        """Return the context [b, s, n, d]; the arguments are those of an AttentionCall.

        With context parallelism s are this rank's positions, and the bias is that of its heads of complete rows.
        """
        size = self.parallel.context_size
        if size == 1:
            return self._attend(query, key, value, sequences, bias)
        if key.shape[2] % size:
            # Several ranks share a head of keys and values: each gets a copy.
            key, value = (x.repeat_interleave(size // key.shape[2], dim=2) for x in (key, value))
        if key.shape[1] == query.shape[1]:
            query, key, value = to_heads((query, key, value), self.parallel)
        else:
            (query,), (key, value) = to_heads((query,), self.parallel), to_heads((key, value), self.parallel)
        return to_positions(self._attend(query, key, value, sequences, bias), self.parallel)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, bias: Tensor | None) -> Tensor:
        """Return the context of complete rows."""
        p, keys = self.dropout if self.training else 0.0, None
        if p > 0.0 and self.draws_by_key:
            keys = ProbabilityKeys(self.streams.key(self.place, query), self.first_head, self.all_heads)
        elif p > 0.0:
            self.streams.seed_generators(self.place)
        biases = (None, bias) if self.reads_distances else (bias, None)
        return self.kernel(query, key, value, AttentionCall(sequences, p, biases[0], keys, biases[1]))


class SelfAttention(Attention):
    """Multi-head self-attention inside each sequence (Vaswani 2017); each rank computes its heads.

    With fewer heads of keys and values, g query heads in a row share one of k (Ainslie 2023, arXiv:2305.13245).
    """

    def __init__(self, settings: BlockSettings, build: ModelBuild) -> None:
        super().__init__(settings, build, settings.attention, ATTENTION)
        key_value_heads = settings.num_key_value_heads or settings.num_heads
        self.num_key_value_heads = key_value_heads // build.parallel.size
        self.rotary = settings.rotary
        self.rotate = None if settings.rotary is None else build.kernels.rotary
        width, key_width = settings.attention_width, settings.attention.head_size * key_value_heads
        self.qkv = column_parallel_linear(
            settings.hidden_size, width + 2 * key_width, settings.qkv_init, build.kernels, build.parallel,
            blocks=(width, key_width, key_width), bias=settings.linear_bias,
        )  # fmt: skip

    def forward(
        self,
        hidden: Tensor,
        sequence_ids: Tensor,
        sequence_starts: Tensor,
        position_ids: Tensor | None = None,
        with_scores: bool = False,
        bias: Tensor | None = None,
        ranks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Map hidden to the same shape, and `with_scores` to the scores [b, n, s, s] of this rank's heads, else None.

        sequence_ids [b, s], sequence_starts [b, m + 1], position_ids [b, s] for rotary positions, bias [n, s, s] and
        ranks [b, s] if the spec has them.
        """
        query, key, value = self._heads(hidden, sequence_ids, position_ids)
        context = self.attend(query, key, value, Sequences(sequence_ids, sequence_starts, ranks=ranks), bias)
        return self.output(context.flatten(2)), self._scores(query, key) if with_scores else None

    def _heads(self, hidden: Tensor, sequence_ids: Tensor, position_ids: Tensor | None) -> tuple[Tensor, ...]:
        """Return queries [b, s, n, d], keys and values [b, s, k, d] of this rank."""
        sizes = self.num_heads, self.num_key_value_heads, self.num_key_value_heads
        heads = self.qkv(hidden).view(*self.parallel.own_shape(sequence_ids), sum(sizes), -1)
        if self.rotary is None:
            return heads.split(sizes, dim=2)
        assert position_ids is not None and self.rotate is not None
        return self.rotate(heads, sizes, self.rotary.angles(position_ids))

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the products [b, n, s, s] over sqrt(d)."""
        group = self.num_heads // self.num_key_value_heads
        key = key.repeat_interleave(group, dim=2) if group > 1 else key
        return query.transpose(1, 2) @ key.permute(0, 2, 3, 1) * query.shape[-1] ** -0.5


class FeedForward(nn.Module):
    """Two linear layers with an activation between them.

    In a gated one the activation of the first layer's first half is a factor of its second half (Shazeer 2020).
    """

    def __init__(self, settings: BlockSettings, build: ModelBuild) -> None:
        super().__init__()
        width, inner, bias = settings.hidden_size, settings.intermediate_size, settings.linear_bias
        kernels, parallel, self.activation = build.kernels, build.parallel, settings.activation
        self.gate = kernels.gated_activation if settings.gated else None
        blocks = (inner, inner) if settings.gated else ()
        self.up = column_parallel_linear(
            width, sum(blocks) or inner, settings.init, kernels, parallel,
            None if settings.gated else self.activation, blocks, bias,
        )  # fmt: skip
        self.down = row_parallel_linear(
            inner, width, settings.mlp_output_init or settings.residual_init, kernels, parallel, bias
        )
        self.dropout = InnerDropout(settings.inner_dropout, kernels, parallel)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden to the same shape."""
        inner = self.up(hidden)
        return self.down(self.dropout(inner if self.gate is None else self.gate(inner, self.activation)))


class TransformerLayer(nn.Module):
    """One layer: self-attention and feed-forward, dropout on the output of both, each with a residual connection."""

    def __init__(self, settings: BlockSettings, build: ModelBuild) -> None:
        super().__init__()
        kernels, parallel = build.kernels, build.parallel
        self.attention = SelfAttention(settings, build)
        self.attention_layer_norm = make_norm(settings, build) if settings.attention_norm else nn.Identity()
        self.mlp = FeedForward(settings, build)
        self.mlp_layer_norm = make_norm(settings, build)
        self.dropout = HiddenDropout(settings.hidden_dropout, kernels, parallel)
        mlp_dropout = settings.hidden_dropout if settings.mlp_dropout is None else settings.mlp_dropout
        self.mlp_dropout = HiddenDropout(mlp_dropout, kernels, parallel)
        self.pre_layer_norm = settings.pre_layer_norm

    def forward(
        self,
        hidden: Tensor,
        sequence_ids: Tensor,
        sequence_starts: Tensor,
        *others: Tensor,
        names: Sequence[str] = (),
        with_scores: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Map hidden to the same shape, `with_scores` also to the scores.

        The arguments are those of SelfAttention; `others` are its arguments of these names.
        """
        named = {"with_scores": with_scores, **dict(zip(names, others, strict=True))}
        hidden, read, scores = self.attend_to_self(hidden, self.mlp_layer_norm, sequence_ids, sequence_starts, **named)
        hidden = self.feed_forward(hidden, read)
        return (hidden, scores) if with_scores else hidden

    def attend_to_self(
        self, hidden: Tensor, next_norm: nn.Module, *arguments: Any, **named: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run the attention; return the two results of `add` and the scores.

        The further arguments and the scores are those of SelfAttention.
        """
        read = self.attention_layer_norm(hidden) if self.pre_layer_norm else hidden
        attended, scores = self.attention(read, *arguments, **named)
        return *self.add(attended, hidden, ATTENTION_OUTPUT, self.attention_layer_norm, next_norm), scores

    def add(
        self, found: Tensor, hidden: Tensor, place: int, own_norm: nn.Module, next_norm: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """Add the output of an attention to hidden; return the sum and what the next part of the layer reads.

        The sum has a norm: that of the attention, after it, or that of the next part, before it.
        """
        drop = self.dropout.of(found, place)
        if self.pre_layer_norm:
            return next_norm(found, hidden, drop=drop, with_sum=True)
        hidden = own_norm(found, hidden, drop=drop)
        return hidden, hidden

    def feed_forward(self, hidden: Tensor, read: Tensor) -> Tensor:
        """Run the feed-forward part on `read`, and add its output to hidden."""
        found = self.mlp(read)
        if self.pre_layer_norm:
            # The norm of this sum is in the next layer.
            return hidden + self.mlp_dropout(found, MLP_OUTPUT)
        return self.mlp_layer_norm(found, hidden, drop=self.mlp_dropout.of(found, MLP_OUTPUT))
