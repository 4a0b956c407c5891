"""StableAdamW (Wortsman 2023, algorithm 2): AdamW with Adafactor's bound on the step of each complete parameter.

The learning rate of a parameter is divided by max(1, RMS), the root mean square of g / max(sqrt(v), eps) over its
elements: g is the gradient and v the second moment with bias correction, which the gradient is part of. The rate of the
weight decay is divided too, as in torch-optimi (`StableAdamW`), with which ModernBERT was trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ctxlm_ds.recipe.sections import UpdateSizes
from ctxlm_ds.training.optimizers.base import FLOAT, AdamSection, Optimizer

if TYPE_CHECKING:
    import torch

    from ctxlm_ds.training.optimizers.steps import Stepper


class StableAdamWSection(AdamSection):
    """AdamW with a bounded step of each parameter (Wortsman 2023); gradients need no clipping."""

    bytes_per_element: ClassVar = 148
    """AdamW's direction 88, gradient over root 36, norm 4, bound 8, weight 12."""

    name: str = "stable_adamw"

    def follows_width(self) -> bool:
        return True

    def workspace(self, sizes: UpdateSizes) -> int:
        """Return the bytes of the directions and surprises of a group, and of one tensor's temporary."""
        return FLOAT * (2 * sizes.group + (sizes.group if sizes.partitioned else sizes.largest))


class StableAdamW(Optimizer):
    """AdamW with decoupled weight decay, bias correction and a bounded step."""

    section = StableAdamWSection

    def step_group(self, states: Stepper, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        updates = [states.adamw_direction(parameter, group) for parameter in parameters]
        surprises = [self._surprise(states, parameter) for parameter in parameters]
        squares = states.squares(updates[0].device, states.parts(parameters, surprises))[0]
        sizes = squares.new_tensor([math.prod(shape) for shape in states.layout.shapes.values()])
        factor = (squares / sizes).sqrt().clamp_min(1.0).reciprocal()
        for number, _, update in states.parts(parameters, updates):
            update.mul_(factor[number].to(update.dtype))
        for parameter, update in zip(parameters, updates, strict=True):
            parameter.add_(update, alpha=-group["lr"])

    def _surprise(self, states: Stepper, parameter: torch.Tensor) -> torch.Tensor:
        """Return the gradient over the root of the second moment, which this gradient is part of."""
        state, grad = states.state[parameter], parameter.grad
        assert grad is not None
        correction = 1 - self.settings.betas[1] ** state["step"]
        return grad / (state["exp_avg_sq"] / correction).sqrt_().clamp_min_(self.settings.eps)
