"""LAMB (You 2019, algorithm 2) with trust ratios of complete parameters under every ZeRO stage.

The squared norms of a parameter are summed over its fragments and over the ranks of its pipeline stage; of a flat
partition, the ratio would be that of a shard. The update itself is elementwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ctxlm_ds.training.optimizers.whole_parameters import WholeParameterOptimizer


class Lamb(WholeParameterOptimizer):
    """LAMB with decoupled weight decay and bias correction.

    Parameter groups may set `trust_ratio` False: their parameters take Adam's step.
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

    def _step_group(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        updates = [self._adamw_direction(parameter, group) for parameter in parameters]
        if group["trust_ratio"]:
            self._scale_by_trust_ratio(parameters, updates)
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _scale_by_trust_ratio(self, parameters: list[torch.Tensor], updates: list[torch.Tensor]) -> None:
        """Multiply the part of each parameter in `updates` by ||weight|| / ||update||, or by 1 if either norm is 0."""
        parts = list(self._parts(parameters, updates))
        weights = (part._replace(values=part.fragment.weight()) for part in parts)
        weight_norm, update_norm = self._squares(updates[0].device, weights, parts).sqrt()
        both = (weight_norm > 0) & (update_norm > 0)
        ratio = torch.where(both, weight_norm / update_norm.clamp_min(1e-300), 1.0).to(updates[0].dtype).unbind()
        if parts:
            torch._foreach_mul_([part.values for part in parts], [ratio[part.number] for part in parts])
