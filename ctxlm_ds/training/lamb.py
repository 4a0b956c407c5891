"""LAMB (You 2019, algorithm 2) with trust ratios of complete parameters under every ZeRO stage.

DeepSpeed hands an optimizer flat partitions, from which a ratio would be that of a shard. Here the squared norms of a
parameter are summed over its fragments and over the ranks of its pipeline stage. The update itself is elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ctxlm_ds.training.fragments import Fragment

SumOverRanks = Callable[[torch.Tensor], None]


class Lamb(torch.optim.Optimizer):
    """LAMB with decoupled weight decay and bias correction.

    Parameter groups may set `trust_ratio` False: their parameters take Adam's step. `bind` must be called after the
    engine has laid out the parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "trust_ratio": True}
        super().__init__(params, defaults)
        self._fragments: dict[int, list[tuple[int, Fragment]]] = {}
        self._num_parameters = 0
        self._sum_over_ranks: SumOverRanks | None = None

    def bind(self, fragments: Sequence[Fragment], names: Sequence[str], sum_over_ranks: SumOverRanks | None) -> None:
        """Set which parameter each range of each flat tensor belongs to.

        Args:
            fragments: the fragments of this rank.
            names: all parameters, in an order common to all ranks.
            sum_over_ranks: adds a vector over the ranks of the pipeline stage; None if ranks hold complete parameters.
        """
        position = {name: index for index, name in enumerate(names)}
        self._num_parameters = len(names)
        self._fragments = {}
        for fragment in fragments:
            self._fragments.setdefault(id(fragment.owner), []).append((position[fragment.name], fragment))
        self._sum_over_ranks = sum_over_ranks

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            updates = [(p, self._direction(p, group)) for p in group["params"] if p.grad is not None]
            # Stage 3 steps one group at a time and leaves the others empty.
            if updates and group["trust_ratio"]:
                self._scale_by_trust_ratio(updates)
            for parameter, update in updates:
                parameter.add_(update, alpha=-group["lr"])

    def _direction(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Return Adam's step with weight decay added, before the trust ratio."""
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        grad = parameter.grad
        assert grad is not None
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correction1 = 1 - beta1 ** state["step"]
        correction2 = 1 - beta2 ** state["step"]
        denominator = (state["exp_avg_sq"] / correction2).sqrt_().add_(group["eps"])
        update = (state["exp_avg"] / correction1).div_(denominator)
        return update.add_(parameter, alpha=group["weight_decay"])

    def _scale_by_trust_ratio(self, updates: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Multiply the part of each parameter in `updates` by ||weight|| / ||update||, or by 1 if either norm is 0."""
        parts = [
            (index, fragment, update.view(-1).narrow(0, fragment.offset, fragment.length))
            for parameter, update in updates
            for index, fragment in self._fragments.get(id(parameter), [])
        ]
        squares = torch.zeros(2, self._num_parameters, dtype=torch.float64, device=updates[0][0].device)
        for index, fragment, update in parts:
            if fragment.holding.tensor_duplicate:
                continue
            squares[0, index] += torch.linalg.vector_norm(fragment.weight(), dtype=torch.float64).square()
            squares[1, index] += torch.linalg.vector_norm(update, dtype=torch.float64).square()
        if self._sum_over_ranks is not None:
            self._sum_over_ranks(squares)
        weight_norm, update_norm = squares.sqrt()
        both = (weight_norm > 0) & (update_norm > 0)
        ratio = torch.where(both, weight_norm / update_norm.clamp_min(1e-300), 1.0)
        for index, _, update in parts:
            update.mul_(ratio[index].to(update.dtype))
