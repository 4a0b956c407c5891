"""The transformer layer: self-attention and feed-forward, LayerNorm after each (BERT) or before (option).

Shape letters: b rows, s positions, h width, n heads of this rank, d size of a head, m sequences of a row. `hidden` is
[b, s, h], or under sequence parallelism this rank's share of the flattened tokens [b·s / ranks, h].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layer_list import Tensors
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.layers import column_parallel_linear, row_parallel_linear
from ctxlm_ds.parallel.mappings import share_parameters


class LayerNorm(nn.Module):
    """LayerNorm over the width, computed by a kernel."""

    def __init__(self, config: TransformerSection, kernels: KernelSet, parallel: ParallelContext | None = None) -> None:
        """`parallel` where the tokens may be split over ranks; None where every rank sees them all."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.hidden_size))
        self.eps = config.layer_norm_eps
        self.kernel = kernels.layer_norm
        self.parallel = parallel or ParallelContext()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., h] -> [..., h]."""
        weight, bias = share_parameters(self.parallel, self.weight, self.bias)
        return self.kernel(x, weight, bias, self.eps)


class FinalLayerNorm(LayerNorm):
    """The LayerNorm after a pre-LN model's last layer, as a layer of the list."""

    def forward(self, inputs: Tensors) -> Tensors:
        """(hidden, rest…) -> the same."""
        hidden, *rest = inputs
        return (super().forward(hidden), *rest)


class SelfAttention(nn.Module):
    """Multi-head self-attention inside each sequence (Vaswani 2017); each rank computes its heads."""

    def __init__(self, config: TransformerSection, kernels: KernelSet, parallel: ParallelContext) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads // parallel.size
        self.dropout = config.attention_dropout
        self.qkv = column_parallel_linear(config.hidden_size, 3 * config.hidden_size, kernels, parallel)
        self.output = row_parallel_linear(config.hidden_size, config.hidden_size, kernels, parallel)
        self.kernel = kernels.attention
        self.streams = parallel.dropout

    def forward(self, hidden: Tensor, sequence_ids: Tensor, sequence_starts: Tensor) -> Tensor:
        """hidden, sequence_ids [b, s], sequence_starts [b, m + 1] -> as hidden."""
        heads = self.qkv(hidden).view(*sequence_ids.shape, 3, self.num_heads, -1)
        query, key, value = heads.unbind(2)
        dropout_p = self.dropout if self.training else 0.0
        if dropout_p > 0.0:
            self.streams.start_region("attention", split=True)
        context = self.kernel(query, key, value, sequence_ids, sequence_starts, dropout_p)
        return self.output(context.flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, config: TransformerSection, kernels: KernelSet, parallel: ParallelContext) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.up = column_parallel_linear(width, inner, kernels, parallel, config.hidden_activation)
        self.down = row_parallel_linear(inner, width, kernels, parallel)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden -> as hidden."""
        return self.down(self.up(hidden))


class HiddenDropout(nn.Module):
    """Dropout of hidden states: the same on every rank that holds them whole, its own on each that holds a share."""

    def __init__(self, p: float, parallel: ParallelContext) -> None:
        super().__init__()
        self.p = p
        self.parallel = parallel

    def forward(self, x: Tensor, region: str) -> Tensor:
        """x [..., h]; `region` names the place in the layer."""
        if self.training and self.p > 0.0:
            self.parallel.dropout.start_region(region, split=self.parallel.splits_tokens)
        return functional.dropout(x, self.p, self.training)


class TransformerLayer(nn.Module):
    """One layer: self-attention and feed-forward, dropout on the output of both, each with a residual connection."""

    def __init__(self, config: TransformerSection, kernels: KernelSet, parallel: ParallelContext) -> None:
        super().__init__()
        self.attention = SelfAttention(config, kernels, parallel)
        self.attention_layer_norm = LayerNorm(config, kernels, parallel)
        self.mlp = FeedForward(config, kernels, parallel)
        self.mlp_layer_norm = LayerNorm(config, kernels, parallel)
        self.dropout = HiddenDropout(config.hidden_dropout, parallel)
        self.pre_layer_norm = config.pre_layer_norm

    def forward(self, inputs: Tensors) -> Tensors:
        """(hidden, sequence_ids [b, s], sequence_starts [b, m + 1], rest…) -> the same."""
        hidden, sequence_ids, sequence_starts, *rest = inputs
        if self.pre_layer_norm:
            attended = self.attention(self.attention_layer_norm(hidden), sequence_ids, sequence_starts)
            hidden = hidden + self.dropout(attended, "attention output")
            hidden = hidden + self.dropout(self.mlp(self.mlp_layer_norm(hidden)), "mlp output")
        else:
            attended = self.attention(hidden, sequence_ids, sequence_starts)
            hidden = self.attention_layer_norm(hidden + self.dropout(attended, "attention output"))
            hidden = self.mlp_layer_norm(hidden + self.dropout(self.mlp(hidden), "mlp output"))
        return (hidden, sequence_ids, sequence_starts, *rest)
