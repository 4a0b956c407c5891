"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon) on complete matrices, AdamW on all other parameters.

The update of a matrix is its momentum, made nearly orthogonal. Query, key and value of a joint matrix, and the two
halves of a gated one, are separate matrices (`Split.blocks`). The numbers are those of torch.optim.Muon 2.13, which
iterates in bf16, and here in the type of the weights, fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch.optim.adamw import adamw

from ctxlm_ds.training.optimizers.matrices import ITERATIONS, blocks_of, orthogonalization_flops
from ctxlm_ds.training.optimizers.matrix_work import MatrixWork
from ctxlm_ds.training.optimizers.whole_parameters import MOMENTS, ParameterLayout, WholeParameterOptimizer

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial (Jordan 2024)."""
EPS = 1e-7
"""Least norm that a matrix is divided by."""
MatrixScale = Literal["match_rms_adamw", "original"]


class Muon(WholeParameterOptimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    The parameters of groups with `matrices` True are matrices; others take AdamW's step. The learning rate of a group
    is `lr` times its `rate_factor`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        matrix_scale: MatrixScale = "match_rms_adamw",
    ) -> None:
        """Make the optimizer.

        Args:
            params: parameter groups.
            lr: learning rate.
            betas: AdamW's.
            eps: AdamW's.
            weight_decay: of matrices and others.
            momentum: decay rate of the matrices' moment.
            matrix_scale: factor of the matrices' learning rate by their shape (`scale_of`).
        """
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, defaults | {"matrices": False, "rate_factor": 1.0})
        self._matrix_scale = matrix_scale
        self._blocks: dict[str, list[int]] = {}
        self._work = MatrixWork([], {}, None)
        self._rounds: dict[int, int] = {}

    def bind(self, layout: ParameterLayout) -> None:
        """Set which parameter each range of each flat tensor belongs to, and share out the matrices over the ranks."""
        super().bind(layout)
        self._blocks, costs = {}, {}
        for name, shape in layout.matrices():
            self._blocks[name] = blocks_of(layout.facts[name], shape[0])
            costs[name] = orthogonalization_flops(layout.facts[name], shape)
        self._rounds = {id(tensor): number for number, tensor in enumerate(layout.flat_tensors)}
        rounds: list[list[Any]] = [[] for _ in layout.flat_tensors or (None,)]
        for fragment in layout.fragments:
            if fragment.name in costs:
                rounds[self._rounds.get(id(fragment.owner), 0)].append(fragment)
        self._work = MatrixWork(rounds, costs, layout.sharers)

    def _step_group(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        if not group["matrices"]:
            self._step_adamw(group, parameters)
            return
        rate = group["lr"] * group["rate_factor"]
        updates = {id(parameter): self._nesterov(parameter, group) for parameter in parameters}
        self._work.run(self._rounds.get(id(parameters[0]), 0), updates, self._change)
        for parameter in parameters:
            parameter.mul_(1 - rate * group["weight_decay"]).add_(updates[id(parameter)], alpha=-rate)

    def _nesterov(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Return the momentum after this gradient, one step ahead."""
        state, grad, momentum = self._next_state(parameter, ("exp_avg",)), parameter.grad, group["momentum"]
        assert grad is not None
        state["exp_avg"].lerp_(grad, 1 - momentum)
        return grad.lerp(state["exp_avg"], momentum)

    def _change(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return the update of a parameter's matrices for a rate of 1."""
        blocks = self._blocks[name]
        if len(set(blocks)) == 1:
            parts = [matrix.view(len(blocks), blocks[0], -1)]
        else:
            parts = [part.unsqueeze(0) for part in matrix.split(blocks)]
        changed = [orthogonalize(part) * scale_of(part.shape[1], part.shape[2], self._matrix_scale) for part in parts]
        return torch.cat([part.flatten(0, 1) for part in changed])

    def _step_adamw(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        states = [self._next_state(parameter, MOMENTS) for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            # It counts the step itself.
            [torch.tensor(state["step"] - 1.0, device=state["exp_avg"].device) for state in states],
            fused=True, amsgrad=False, maximize=False, lr=group["lr"] * group["rate_factor"],
            beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"], weight_decay=group["weight_decay"],
        )  # fmt: skip


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Replace the singular values of matrices [n, r, c] by values of about 1 (0.7 to 1.2)."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def scale_of(rows: int, columns: int, kind: MatrixScale) -> float:
    """Return the factor of the learning rate for a matrix, as the `adjust_lr_fn` of torch.optim.Muon of that name.

    With `match_rms_adamw` an update has the root mean square 0.2, about that of AdamW (Liu 2025, section 2.2);
    `original` is Jordan's.
    """
    if kind == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
