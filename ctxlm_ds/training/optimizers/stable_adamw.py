"""StableAdamW (Wortsman 2023, algorithm 2): AdamW with Adafactor's bound on the step of each complete parameter.

The learning rate of a parameter is divided by max(1, RMS), the root mean square of g / max(sqrt(v), eps) over its
elements: g is the gradient and v the second moment with bias correction, which the gradient is part of. The rate of the
weight decay is divided too, as in torch-optimi (`StableAdamW`), with which ModernBERT was trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ctxlm_ds.training.optimizers.whole_parameters import WholeParameterOptimizer


class StableAdamW(WholeParameterOptimizer):
    """AdamW with decoupled weight decay, bias correction and a bounded step; gradients need no clipping."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _step_group(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        updates = [self._adamw_direction(parameter, group) for parameter in parameters]
        surprises = [self._surprise(parameter, group) for parameter in parameters]
        squares = self._squares(updates[0].device, self._parts(parameters, surprises))[0]
        sizes = squares.new_tensor([math.prod(shape) for shape in self._layout.shapes.values()])
        factor = (squares / sizes).sqrt().clamp_min(1.0).reciprocal()
        for number, _, update in self._parts(parameters, updates):
            update.mul_(factor[number].to(update.dtype))
        for parameter, update in zip(parameters, updates, strict=True):
            parameter.add_(update, alpha=-group["lr"])

    def _surprise(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Return the gradient over the root of the second moment, which this gradient is part of."""
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        correction = 1 - group["betas"][1] ** state["step"]
        return grad / (state["exp_avg_sq"] / correction).sqrt_().clamp_min_(group["eps"])
