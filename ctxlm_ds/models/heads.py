"""Prediction heads of BERT and RoBERTa: the masked-token transform and next-sentence prediction.

Shape letters: b rows, s positions, p prediction slots, m sequences of a row, h width, v vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ctxlm_ds.config.schema import ModelConfig
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layer_list import Tensors
from ctxlm_ds.models.transformer import LayerNorm
from ctxlm_ds.parallel.layers import replicated_linear


def select_positions(hidden: Tensor, positions: Tensor) -> Tensor:
    """hidden [b, s, h], positions [b, k] -> [b, k, h]: the vectors at those positions of each row."""
    num_rows, seq_length = hidden.shape[:2]
    row_starts = torch.arange(num_rows, device=positions.device)[:, None] * seq_length
    flat = (positions + row_starts).flatten()
    return hidden.flatten(0, 1).index_select(0, flat).unflatten(0, positions.shape)


class EncoderHeads(nn.Module):
    """Everything between the encoder and the tied decoder; works on the predicted positions only."""

    def __init__(self, config: ModelConfig, kernels: KernelSet, next_sentence: bool) -> None:
        """`next_sentence` adds BERT's pooler and classifier over the first position of each sequence."""
        super().__init__()
        width = config.hidden_size
        activated = partial(kernels.bias_gelu, activation=config.hidden_activation)
        self.mlm_transform = replicated_linear(width, width, activated)
        self.mlm_layer_norm = LayerNorm(config, kernels)
        self.pooler = replicated_linear(width, width, kernels.linear) if next_sentence else None
        self.nsp_classifier = replicated_linear(width, 2, kernels.linear) if next_sentence else None

    def forward(self, inputs: Tensors) -> Tensors:
        """(hidden [b, s, h], sequence_ids, sequence_starts, prediction_positions [b, p], cls_positions [b, m])
        -> (masked tokens' vectors [b, p, h], next-sentence logits [b, m, 2] if built with them).
        """
        hidden, _, _, prediction_positions, cls_positions = inputs
        predicted = self.mlm_layer_norm(self.mlm_transform(select_positions(hidden, prediction_positions)))
        if self.pooler is None or self.nsp_classifier is None:
            return (predicted,)
        pooled = torch.tanh(self.pooler(select_positions(hidden, cls_positions)))
        return (predicted, self.nsp_classifier(pooled))


class VocabularyBias(nn.Module):
    """The masked-LM decoder's bias, one a word; the last layer."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(vocab_size))

    def forward(self, inputs: Tensors) -> Tensors:
        """(scores [b, p, v], rest…) -> (logits [b, p, v], rest…)."""
        scores, *rest = inputs
        return (scores + self.bias, *rest)
