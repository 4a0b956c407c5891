"""The part of a plain training loop that every model has: copies to the device, clipping, AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ctxlm_ds.recipe.schema import RunConfig


class PlainLoop:
    """Clips the gradients and updates the weights, with the recipe's settings and torch's fused AdamW."""

    def __init__(self, config: RunConfig, model: nn.Module) -> None:
        self._clip = config.optimizer.gradient_clipping
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters, config.optimizer.learning_rate, **adam_settings(config), fused=True
        )

    def update(self) -> None:
        """End a step."""
        if self._clip:
            nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()


def adam_settings(config: RunConfig) -> dict[str, Any]:
    """Return betas, epsilon and weight decay of the recipe; torch's own where its optimizer has none (Adafactor)."""
    names = ("betas", "eps", "weight_decay")
    given = {name: getattr(config.optimizer, name, None) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def on_device(fields: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy the fields of a micro-batch."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in fields.items()}
