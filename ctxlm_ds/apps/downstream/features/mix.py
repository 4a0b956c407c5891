"""A trained weighted sum of layers (Peters 2018, equation 1; allennlp/modules/scalar_mix.py)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScalarMix(nn.Module):
    """gamma * sum_j softmax(w)_j h_j, with gamma 1 and w 0 at the start: the mean of the layers.

    In training, `layer_dropout` leaves out each layer with that probability, and the others share its weight (UDify,
    Kondratyuk and Straka 2019).
    """

    def __init__(self, num_layers: int, layer_dropout: float = 0.0) -> None:
        super().__init__()
        self.scalars = nn.Parameter(torch.zeros(num_layers))
        self.gamma = nn.Parameter(torch.ones(()))
        self.layer_dropout = layer_dropout

    def weights(self) -> Tensor:
        """Return softmax(w), [layers]; without the layers that are dropped."""
        scalars = self.scalars
        if self.training and self.layer_dropout > 0:
            dropped = torch.rand_like(scalars) < self.layer_dropout
            if not dropped.all():
                scalars = scalars.masked_fill(dropped, -torch.inf)
        return scalars.softmax(dim=0)

    def penalty(self) -> Tensor:
        """Return ||w||^2, with which the loss draws the weights towards the mean of the layers."""
        return self.scalars.square().sum()

    def forward(self, layers: Tensor) -> Tensor:
        """Map layers [..., layers, width] to [..., width]."""
        return self.gamma * torch.einsum("l,...lw->...w", self.weights(), layers)
