"""The transformer layer: self-attention and feed-forward, LayerNorm after each (BERT) or before (option).

Shape letters: b rows, s positions, h width, n heads, d size of a head, m sequences of a row.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ctxlm_ds.config.schema import ModelConfig
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layer_list import Tensors
from ctxlm_ds.parallel.layers import column_parallel_linear, row_parallel_linear


class LayerNorm(nn.Module):
    """LayerNorm over the width, computed by a kernel."""

    def __init__(self, config: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.hidden_size))
        self.eps = config.layer_norm_eps
        self.kernel = kernels.layer_norm

    def forward(self, x: Tensor) -> Tensor:
        """x [..., h] -> [..., h]."""
        return self.kernel(x, self.weight, self.bias, self.eps)


class FinalLayerNorm(LayerNorm):
    """The LayerNorm after a pre-LN encoder, as a layer of the list."""

    def forward(self, inputs: Tensors) -> Tensors:
        """(hidden [b, s, h], rest…) -> the same."""
        hidden, *rest = inputs
        return (super().forward(hidden), *rest)


class SelfAttention(nn.Module):
    """Multi-head self-attention inside each sequence (Vaswani 2017)."""

    def __init__(self, config: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.dropout = config.attention_dropout
        self.qkv = column_parallel_linear(config.hidden_size, 3 * config.hidden_size, kernels.linear)
        self.output = row_parallel_linear(config.hidden_size, config.hidden_size, kernels.linear)
        self.kernel = kernels.attention

    def forward(self, hidden: Tensor, sequence_ids: Tensor, sequence_starts: Tensor) -> Tensor:
        """hidden [b, s, h], sequence_ids [b, s], sequence_starts [b, m + 1] -> [b, s, h]."""
        query, key, value = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        dropout_p = self.dropout if self.training else 0.0
        context = self.kernel(query, key, value, sequence_ids, sequence_starts, dropout_p)
        return self.output(context.flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, config: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        activated = partial(kernels.bias_gelu, activation=config.hidden_activation)
        self.up = column_parallel_linear(config.hidden_size, config.intermediate_size, activated)
        self.down = row_parallel_linear(config.intermediate_size, config.hidden_size, kernels.linear)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [b, s, h] -> [b, s, h]."""
        return self.down(self.up(hidden))


class TransformerLayer(nn.Module):
    """One layer of an encoder; dropout on the output of both blocks, each with a residual connection."""

    def __init__(self, config: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.attention = SelfAttention(config, kernels)
        self.attention_layer_norm = LayerNorm(config, kernels)
        self.mlp = FeedForward(config, kernels)
        self.mlp_layer_norm = LayerNorm(config, kernels)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.pre_layer_norm = config.pre_layer_norm

    def forward(self, inputs: Tensors) -> Tensors:
        """(hidden [b, s, h], sequence_ids [b, s], sequence_starts [b, m + 1], rest…) -> the same."""
        hidden, sequence_ids, sequence_starts, *rest = inputs
        if self.pre_layer_norm:
            attended = self.attention(self.attention_layer_norm(hidden), sequence_ids, sequence_starts)
            hidden = hidden + self.dropout(attended)
            hidden = hidden + self.dropout(self.mlp(self.mlp_layer_norm(hidden)))
        else:
            attended = self.attention(hidden, sequence_ids, sequence_starts)
            hidden = self.attention_layer_norm(hidden + self.dropout(attended))
            hidden = self.mlp_layer_norm(hidden + self.dropout(self.mlp(hidden)))
        return (hidden, sequence_ids, sequence_starts, *rest)
