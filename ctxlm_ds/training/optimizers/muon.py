"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon) on complete matrices, AdamW on all other parameters.

The update of a matrix is its momentum, made nearly orthogonal. Query, key and value of a joint matrix, and the two
halves of a gated one, are separate matrices (`Split.blocks`). The numbers are those of torch.optim.Muon 2.13, which
iterates in bf16, and here in the type of the weights, fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import MOMENTS, Probability
from ctxlm_ds.training.optimizers.base import AdamSection, GroupKind, Optimizer

if TYPE_CHECKING:
    import torch

    from ctxlm_ds.training.optimizers.steps import ParameterLayout, Stepper

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial (Jordan 2024)."""
ITERATIONS = 5
EPS = 1e-7
"""Least norm that a matrix is divided by."""
MatrixScale = Literal["match_rms_adamw", "original"]


class MuonSection(AdamSection):
    """Muon (Jordan 2024) for matrices; AdamW for tables, heads, biases and norms."""

    matrix_moments: ClassVar = MOMENTS[:1]
    bytes_per_matrix_element: ClassVar = 80
    """Momentum 24, norm 4, division 8, scale, join, copy 24, decay 8, weight 12."""
    matrix_copies: ClassVar = 4
    """Two values of the iteration, its square, and the square's square."""

    name: str = "muon"
    matrix_learning_rate: Annotated[float, Field(gt=0.0, le=1000.0)] | None = None
    """Peak learning rate of the matrices, which follows the same schedule; null is learning_rate."""
    matrix_scale: MatrixScale = "match_rms_adamw"
    """Factor of the matrices' learning rate by their shape: `match_rms_adamw` is 0.2 sqrt(max(rows, columns)), with
    which rates and decay of AdamW fit (Liu 2025), `original` sqrt(max(1, rows / columns))."""
    momentum: Probability = 0.95
    """Decay rate of the matrices' moment."""

    def follows_width(self) -> bool:
        return self.matrix_scale == "original"

    def problems(self, kernel: str) -> Iterator[Problem]:
        yield from super().problems(kernel)
        if self.momentum >= 1.0:
            yield Problem("optimizer.momentum", f"{self.momentum}: with 1 it never changes; expected below 1")

    def matrix_flops(self, blocks: Sequence[int], columns: int) -> float:
        """Return the operations of all iterations of Newton-Schulz."""
        pairs = (sorted((block, columns)) for block in blocks)
        return float(sum(2 * ITERATIONS * (2 * short * short * long + short**3) for short, long in pairs))


class Muon(Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    The learning rate of the group of matrices is `lr` times its `rate_factor`.
    """

    section = MuonSection

    def group_settings(self, kind: GroupKind) -> dict[str, Any]:
        settings, own = self.settings, kind == "matrices"
        factor = (settings.matrix_learning_rate or settings.learning_rate) / settings.learning_rate if own else 1.0
        return {**super().group_settings(kind), "matrices": own, "rate_factor": factor}

    def bind(self, layout: ParameterLayout) -> None:
        """Share out the matrices over the ranks."""
        from ctxlm_ds.training.optimizers.matrix_work import MatrixWork, blocks_of

        matrices = {name: shape for name, shape in layout.shapes.items() if layout.facts[name].matrix}
        self._blocks = {name: blocks_of(layout.facts[name], shape[0]) for name, shape in matrices.items()}
        costs = {name: self.settings.matrix_flops(self._blocks[name], shape[1]) for name, shape in matrices.items()}
        self._rounds = {id(tensor): number for number, tensor in enumerate(layout.flat_tensors)}
        rounds: list[list[Any]] = [[] for _ in layout.flat_tensors or (None,)]
        for fragment in layout.fragments:
            if fragment.name in costs:
                rounds[self._rounds.get(id(fragment.owner), 0)].append(fragment)
        self._work = MatrixWork(rounds, costs, layout.sharers)

    def step_group(self, states: Stepper, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        if not group["matrices"]:
            self._step_adamw(states, group, parameters)
            return
        rate = group["lr"] * group["rate_factor"]
        updates = {id(parameter): self._nesterov(states, parameter) for parameter in parameters}
        self._work.run(self._rounds.get(id(parameters[0]), 0), updates, self._change)
        for parameter in parameters:
            parameter.mul_(1 - rate * group["weight_decay"]).add_(updates[id(parameter)], alpha=-rate)

    def _nesterov(self, states: Stepper, parameter: torch.Tensor) -> torch.Tensor:
        """Return the momentum after this gradient, one step ahead."""
        state, grad, momentum = states.next_state(parameter, MOMENTS[:1]), parameter.grad, self.settings.momentum
        assert grad is not None
        first: torch.Tensor = state[MOMENTS[0]]
        first.lerp_(grad, 1 - momentum)
        return grad.lerp(first, momentum)

    def _change(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return the update of a parameter's matrices for a rate of 1."""
        import torch

        blocks = self._blocks[name]
        if len(set(blocks)) == 1:
            parts = [matrix.view(len(blocks), blocks[0], -1)]
        else:
            parts = [part.unsqueeze(0) for part in matrix.split(blocks)]
        scale = self.settings.matrix_scale
        changed = [orthogonalize(part) * scale_of(part.shape[1], part.shape[2], scale) for part in parts]
        return torch.cat([part.flatten(0, 1) for part in changed])

    def _step_adamw(self, states: Stepper, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        import torch
        from torch.optim.adamw import adamw

        beta1, beta2 = self.settings.betas
        kept = [states.next_state(parameter, MOMENTS) for parameter in parameters]
        adamw(
            list(parameters),
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in kept],
            [state["exp_avg_sq"] for state in kept],
            [],
            # It counts the step itself.
            [torch.tensor(state["step"] - 1.0, device=state["exp_avg"].device) for state in kept],
            fused=True, amsgrad=False, maximize=False, lr=group["lr"] * group["rate_factor"],
            beta1=beta1, beta2=beta2, eps=self.settings.eps, weight_decay=group["weight_decay"],
        )  # fmt: skip


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Replace the singular values of matrices [n, r, c] by values of about 1 (0.7 to 1.2)."""
    import torch

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
