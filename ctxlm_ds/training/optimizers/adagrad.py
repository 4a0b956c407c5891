"""Adagrad (Duchi 2011) as tf.train.AdagradOptimizer computes it, with which ELMo was trained.

Each element's rate is divided by the root of a sum of its squared gradients, which begins at `initial_accumulator`. The
update is elementwise, so every ZeRO stage splits it anywhere. The sum is kept and saved as the second moment. torch's
class would do, but DeepSpeed makes another one of it, without the parameter groups.

A loss times s with the accumulator a and the clipping norm c gives the same updates as the loss itself with a / s² and
c / s. bilm-tf's s = 20, a = 1, c = 10 are therefore `initial_accumulator: 0.0025` and `gradient_clipping: 0.5`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ctxlm_ds.recipe.sections import MOMENTS, NonNegativeFloat, OptimizerSection, PositiveFraction, UpdateSizes
from ctxlm_ds.training.optimizers.base import FLOAT, Optimizer

if TYPE_CHECKING:
    import torch

    from ctxlm_ds.training.optimizers.steps import Stepper

SECOND = MOMENTS[1]


class AdagradSection(OptimizerSection):
    """Adagrad (Duchi 2011) with decoupled weight decay."""

    moments: ClassVar = (SECOND,)
    bytes_per_element: ClassVar = 52
    """Decay 8, sum 12, root 16, weight 16."""
    json_params: ClassVar = {**OptimizerSection.json_params, "eps": "eps"}

    name: str = "adagrad"
    eps: PositiveFraction = 1e-6
    """Added to the square root of the sum of squared gradients."""
    initial_accumulator: NonNegativeFloat = 0.1
    """Initial value of the sums of squared gradients."""

    def workspace(self, sizes: UpdateSizes) -> int:
        """Return the bytes of the denominator of one tensor."""
        return FLOAT * (sizes.group if sizes.partitioned else sizes.largest)


class Adagrad(Optimizer):
    """Adagrad, elementwise."""

    section = AdagradSection

    def step_group(self, states: Stepper, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        from ctxlm_ds.training.optimizers.steps import ranges_of

        for parameter in parameters:
            assert parameter.grad is not None
            total = states.next_state(parameter, (SECOND,), self.settings.initial_accumulator)[SECOND]
            for weight, grad, squares in ranges_of(parameter, parameter.grad, total):
                if group["weight_decay"]:
                    weight.mul_(1.0 - group["lr"] * group["weight_decay"])
                squares.addcmul_(grad, grad)
                weight.addcdiv_(grad, squares.sqrt().add_(self.settings.eps), value=-group["lr"])
