"""A named copy of a tensor of the list: what a loss term reads of the layers between the first and the last."""

from __future__ import annotations

from torch import Tensor, nn

from ctxlm_ds.models.layers import LayerDescription


def tap(name: str, into: str) -> LayerDescription:
    """Describe the layer that keeps the present value of `name` as `into`, for layers and terms after it.

    Later layers may write `name` anew. Attention scores are tapped where they are made
    (models/parts/transformer.py, `scores`).
    """
    return LayerDescription(f"tap_{into}", Tap, (name,), (into,))


class Tap(nn.Module):
    """Hands on what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x, its gradient added to that of its other readers."""
        return x
