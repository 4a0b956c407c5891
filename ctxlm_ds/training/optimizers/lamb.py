"""LAMB (You 2019, algorithm 2) with trust ratios of complete parameters under every ZeRO stage.

The squared norms of a parameter are summed over its fragments and over the ranks of its pipeline stage; of a flat
partition, the ratio would be that of a shard. The update itself is elementwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import UpdateSizes
from ctxlm_ds.training.optimizers.adamw import adam_arguments, apex_optimizer
from ctxlm_ds.training.optimizers.base import FLOAT, AdamSection, GroupKind, Optimizer, OptimizerPlace

if TYPE_CHECKING:
    import torch

    from ctxlm_ds.training.optimizers.steps import Stepper


class LambSection(AdamSection):
    """LAMB (You 2019)."""

    kernels: ClassVar = ("auto", "reference", "apex")
    bytes_per_element: ClassVar = 116
    """AdamW's direction in 9 operations 88, two norms 8, ratio 8, weight 12."""

    name: str = "lamb"
    trust_ratio: Literal["weights", "all"] = "weights"
    """Parameters whose step is scaled by ||weight|| / ||step||: `weights` (all but biases and LayerNorm, as the
    authors' code) or `all` (as the paper's algorithm 2). Neither depends on weight_decay."""

    def workspace(self, sizes: UpdateSizes) -> int:
        """Return the bytes of the directions of a group, and of one tensor's temporary."""
        return FLOAT * (sizes.group + (sizes.group if sizes.partitioned else sizes.largest))

    def tensor_parallel_problems(self, size: int, kernel: str) -> Iterator[Problem]:
        if kernel == "apex":
            tensor = "parallel.tensor_parallel_size"
            text = (
                f"apex's LAMB would compute its trust ratios over the part of each rank ({tensor} {size}); "
                "set auto or reference, which compute them over complete parameters"
            )
            yield Problem("kernels.optimizer", text, ("optimizer.name", tensor))


class Lamb(Optimizer):
    """LAMB with decoupled weight decay and bias correction; groups without a trust ratio take Adam's step."""

    section = LambSection

    def group_settings(self, kind: GroupKind) -> dict[str, Any]:
        ratio = kind == "weights" or self.settings.trust_ratio == "all"
        return {**super().group_settings(kind), "trust_ratio": ratio}

    def build(
        self, groups: list[dict[str, Any]], kernel: str, place: OptimizerPlace
    ) -> tuple[torch.optim.Optimizer, str]:
        if kernel != "apex":
            return super().build(groups, kernel, place)
        if place.zero_stage > 0:
            raise ConfigError(
                f"kernels.optimizer is apex with lamb under ZeRO stage {place.zero_stage}: FusedLAMB would take its "
                "trust ratios from each rank's shard, not from complete parameters; set kernels.optimizer: auto"
            )
        all_take_ratios = all(group["trust_ratio"] for group in groups)
        if not all_take_ratios and any(group["trust_ratio"] != (group["weight_decay"] != 0.0) for group in groups):
            raise ConfigError(
                "kernels.optimizer is apex with lamb: FusedLAMB takes a trust ratio for exactly the parameters that "
                "are decayed, or for all; set kernels.optimizer: auto, or optimizer.trust_ratio: all"
            )
        # The engine clips. FusedLAMB reads a bound of 0 as gradients divided by infinity.
        bounds = {"max_grad_norm": math.inf, "use_nvlamb": all_take_ratios}
        return apex_optimizer("FusedLAMB")(groups, **bounds, **adam_arguments(self.settings)), "lamb=apex"

    def step_group(self, states: Stepper, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        import torch

        updates = [states.adamw_direction(parameter, group) for parameter in parameters]
        if group["trust_ratio"]:
            _scale_by_trust_ratio(states, parameters, updates)
        torch._foreach_add_(list(parameters), updates, alpha=-group["lr"])


def _scale_by_trust_ratio(states: Stepper, parameters: Sequence[torch.Tensor], updates: Sequence[torch.Tensor]) -> None:
    """Multiply the part of each parameter in `updates` by ||weight|| / ||update||, or by 1 if either norm is 0."""
    import torch

    parts = list(states.parts(parameters, updates))
    weights = (part._replace(values=part.fragment.weight()) for part in parts)
    weight_norm, update_norm = states.squares(updates[0].device, weights, parts).sqrt()
    both = (weight_norm > 0) & (update_norm > 0)
    ratio = torch.where(both, weight_norm / update_norm.clamp_min(1e-300), 1.0).to(updates[0].dtype).unbind()
    if parts:
        torch._foreach_mul_([part.values for part in parts], [ratio[part.number] for part in parts])
