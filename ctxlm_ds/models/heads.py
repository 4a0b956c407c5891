"""Prediction heads of BERT and RoBERTa: the masked-token transform and next-sentence prediction.

Shape letters: b rows, s positions, p prediction slots, m sequences of a row, h width, v this rank's vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layer_list import Tensors
from ctxlm_ds.models.transformer import LayerNorm
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.layers import VocabParallelBias, replicated_linear
from ctxlm_ds.parallel.mappings import gather_tokens


def select_positions(hidden: Tensor, positions: Tensor) -> Tensor:
    """hidden [b, s, h], positions [b, k] -> [b, k, h]: the vectors at those positions of each row."""
    num_rows, seq_length = hidden.shape[:2]
    row_starts = torch.arange(num_rows, device=positions.device)[:, None] * seq_length
    flat = (positions + row_starts).flatten()
    return hidden.flatten(0, 1).index_select(0, flat).unflatten(0, positions.shape)


class EncoderHeads(nn.Module):
    """Everything between the encoder and the tied decoder; works on the predicted positions only.

    Tensor-parallel ranks compute it alike: it is small, and its parameters then get whole gradients everywhere.
    """

    def __init__(
        self, config: TransformerSection, kernels: KernelSet, parallel: ParallelContext, next_sentence: bool
    ) -> None:
        """`next_sentence` adds BERT's pooler and classifier over the first position of each sequence."""
        super().__init__()
        width = config.hidden_size
        self.parallel = parallel
        self.mlm_transform = replicated_linear(width, width, kernels, config.hidden_activation)
        self.mlm_layer_norm = LayerNorm(config, kernels)
        self.pooler = replicated_linear(width, width, kernels) if next_sentence else None
        self.nsp_classifier = replicated_linear(width, 2, kernels) if next_sentence else None

    def forward(self, inputs: Tensors) -> Tensors:
        """(hidden, sequence_ids, sequence_starts, prediction_positions [b, p], cls_positions [b, m])
        -> (masked tokens' vectors [b, p, h], next-sentence logits [b, m, 2] if built with them).
        """
        hidden, sequence_ids, _, prediction_positions, cls_positions = inputs
        if self.parallel.splits_tokens:
            hidden = gather_tokens(hidden, self.parallel).unflatten(0, sequence_ids.shape)
        predicted = self.mlm_layer_norm(self.mlm_transform(select_positions(hidden, prediction_positions)))
        if self.pooler is None or self.nsp_classifier is None:
            return (predicted,)
        pooled = torch.tanh(self.pooler(select_positions(hidden, cls_positions)))
        return (predicted, self.nsp_classifier(pooled))


class VocabularyBias(VocabParallelBias):
    """The masked-LM decoder's bias, one a word; the last layer."""

    def forward(self, inputs: Tensors) -> Tensors:
        """(scores [b, p, v], rest…) -> (logits [b, p, v], rest…)."""
        scores, *rest = inputs
        return (self.add(scores), *rest)
