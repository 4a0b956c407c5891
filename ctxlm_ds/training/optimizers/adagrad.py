"""Adagrad (Duchi 2011) as tf.train.AdagradOptimizer computes it, with which ELMo was trained.

Each element's rate is divided by the root of a sum of its squared gradients, which begins at `initial_accumulator`. The
update is elementwise, so every ZeRO stage splits it anywhere. The sum is kept and saved as the second moment.

A loss times s with the accumulator a and the clipping norm c gives the same updates as the loss itself with a / s² and
c / s. bilm-tf's s = 20, a = 1, c = 10 are therefore `initial_accumulator: 0.0025` and `gradient_clipping: 0.5`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ctxlm_ds.training.optimizers.whole_parameters import CHUNK_ELEMENTS, MOMENTS

SECOND = MOMENTS[1]


class Adagrad(torch.optim.Optimizer):
    """Adagrad with decoupled weight decay.

    torch's class would do, but DeepSpeed makes another one of it, without the parameter groups.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        initial_accumulator: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})
        self.initial_accumulator = initial_accumulator

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"step": 0, SECOND: torch.full_like(parameter, self.initial_accumulator)}
        state["step"] += 1
        size = CHUNK_ELEMENTS if parameter.device.type == "cpu" else max(1, parameter.numel())
        pieces = (tensor.reshape(-1).split(size) for tensor in (parameter, gradient, state[SECOND]))
        for weight, grad, total in zip(*pieces, strict=True):
            if group["weight_decay"]:
                weight.mul_(1.0 - group["lr"] * group["weight_decay"])
            total.addcmul_(grad, grad)
            weight.addcdiv_(grad, total.sqrt().add_(group["eps"]), value=-group["lr"])
