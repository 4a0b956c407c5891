"""Prediction heads: the masked-token transform, and a classifier over each sequence's first position.

Shape letters: b rows, s positions, p prediction slots, m sequences of a row, h width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctxlm_ds.models.build import ModelBuild
from ctxlm_ds.models.parts.transformer import LayerNorm
from ctxlm_ds.parallel.layers import replicated_linear
from ctxlm_ds.parallel.mappings import gather_tokens
from ctxlm_ds.parallel.parameters import Init


def select_positions(hidden: Tensor, positions: Tensor) -> Tensor:
    """Return the vectors [b, k, h] at positions [b, k] of each row of hidden [b, s, h]."""
    num_rows, seq_length = hidden.shape[:2]
    row_starts = torch.arange(num_rows, device=positions.device)[:, None] * seq_length
    flat = (positions + row_starts).flatten()
    return hidden.flatten(0, 1).index_select(0, flat).unflatten(0, positions.shape)


class EncoderHeads(nn.Module):
    """The layers between an encoder and its tied decoder, on the predicted positions only.

    They are small, so every tensor-parallel rank computes all of them and has their complete gradients.
    """

    def __init__(
        self, width: int, eps: float, activation: str, init: Init, build: ModelBuild, num_classes: int = 0
    ) -> None:
        """Make the layers.

        Args:
            width: h.
            eps: epsilon of the LayerNorm.
            activation: name of the transform's activation.
            init: initial values of the weights.
            build: kernels and this rank's share.
            num_classes: classes of BERT's pooler and classifier over each sequence's first position; 0 for neither.
        """
        super().__init__()
        kernels, self.parallel = build.kernels, build.parallel
        self.mlm_transform = replicated_linear(width, width, init, kernels, activation)
        self.mlm_layer_norm = LayerNorm(width, eps, kernels)
        self.pooler = replicated_linear(width, width, init, kernels, optional=True) if num_classes else None
        self.nsp_classifier = (
            replicated_linear(width, num_classes, init, kernels, optional=True) if num_classes else None
        )

    def forward(
        self, hidden: Tensor, sequence_ids: Tensor, prediction_positions: Tensor, cls_positions: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the predicted tokens' vectors [b, p, h] and, with classes, the sequences' logits [b, m, classes].

        Args:
            hidden: hidden states of the encoder.
            sequence_ids: [b, s], for the shape of a row.
            prediction_positions: [b, p].
            cls_positions: [b, m], first position of each sequence; None without classes.
        """
        if self.parallel.splits_tokens:
            hidden = gather_tokens(hidden, self.parallel).unflatten(0, sequence_ids.shape)
        predicted = self.mlm_layer_norm(self.mlm_transform(select_positions(hidden, prediction_positions)))
        if self.pooler is None or self.nsp_classifier is None or cls_positions is None:
            return predicted
        pooled = torch.tanh(self.pooler(select_positions(hidden, cls_positions)))
        return predicted, self.nsp_classifier(pooled)
