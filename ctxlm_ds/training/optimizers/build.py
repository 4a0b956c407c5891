"""Parameter groups of an optimizer, and its states in one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

import torch

from ctxlm_ds.parallel.parameters import ParameterFacts
from ctxlm_ds.recipe.sections import MOMENTS, OptimizerSection
from ctxlm_ds.training.optimizers.base import GroupKind, optimizer_of

KINDS = get_args(GroupKind)
LANES = 64
"""fp32 elements of the longest vector that a build of CPUAdam uses (SVE, 2,048 bits)."""


def parameter_groups(
    named: Iterable[tuple[str, torch.nn.Parameter]], facts: Mapping[str, ParameterFacts], settings: OptimizerSection
) -> list[dict[str, Any]]:
    """Split the parameters into matrices that the optimizer takes complete, other weights, the rest, and fixed ones.

    The gradients of fixed ones become 0, so that norms are those of the trained ones, in every layout.
    """
    found: dict[tuple[GroupKind, float], list[torch.nn.Parameter]] = {}
    for name, parameter in named:
        own = settings.matrix_moments is not None and facts[name].matrix
        other: GroupKind = "fixed" if facts[name].fixed else "weights" if facts[name].decays else "rest"
        key: tuple[GroupKind, float] = ("matrices", 1.0) if own else (other, facts[name].rate_factor)
        found.setdefault(key, []).append(parameter)
        if not own and other == "fixed":
            parameter.register_hook(torch.zeros_like)
    optimizer = optimizer_of(settings)
    return [
        {"params": group, "moves": factor, **optimizer.group_settings(kind)}
        for (kind, factor), group in sorted(found.items(), key=lambda item: (KINDS.index(item[0][0]), -item[0][1]))
    ]


def completed_updates(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of updates applied (skipped fp16 steps do not count)."""
    # DeepSpeed's FusedAdam counts only for the last tensor of a group, so the largest count is the right one.
    kept = [*optimizer.state.values(), *optimizer.param_groups]
    return max((int(holder["step"]) for holder in kept if "step" in holder), default=0)


def restore_state(
    optimizer: torch.optim.Optimizer, owners: Iterable[torch.Tensor], updates: int, kinds: Iterable[str] = MOMENTS
) -> None:
    """Give every owner tensor zeroed moments and the step count, in the form that this optimizer uses."""
    names = tuple(kinds)
    tensor_step = type(optimizer).__module__.startswith("torch.optim.")
    for owner in owners:
        state: dict[str, Any] = {name: torch.zeros_like(owner, requires_grad=False) for name in names}
        state["step"] = torch.tensor(float(updates)) if tensor_step else updates
        if tensor_step and optimizer.defaults.get("fused") and owner.device.type != "cpu":
            state["step"] = state["step"].to(owner.device)
        optimizer.state[owner] = state
    for group in optimizer.param_groups:
        # apex keeps one step count per group, not per parameter.
        if "step" in group or type(optimizer).__module__.startswith("apex."):
            group["step"] = updates
    if hasattr(optimizer, "ds_opt_adam"):
        _replay_bias_correction(optimizer, updates)


def forget_state(optimizer: torch.optim.Optimizer, owners: Iterable[torch.Tensor]) -> None:
    """Drop moments and step counts, so that the next update begins from none."""
    for owner in owners:
        optimizer.state.pop(owner, None)
    for group in optimizer.param_groups:
        group.pop("step", None)


def _replay_bias_correction(optimizer: Any, updates: int) -> None:
    """Bring DeepSpeed's CPUAdam to the bias correction that it would have without an interruption.

    Its C++ part multiplies the powers of beta step by step in fp32. A new one computes them with pow(), which rounds
    differently. Updates at rate 0 restore them (1.5 s for a million).
    """
    group = optimizer.param_groups[0]
    beta1, beta2 = group["betas"]
    scratch = [torch.zeros(LANES) for _ in range(4)]
    for step in range(1, updates + 1):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id, step, 0.0, beta1, beta2, group["eps"], 0.0, group["bias_correction"], *scratch
        )


def use_full_vectors(optimizer: torch.optim.Optimizer) -> None:
    """Make DeepSpeed's CPUAdam round every element identically at every offset; other optimizers already do."""
    operator = getattr(optimizer, "ds_opt_adam", None)
    if operator is not None and not isinstance(operator, _FullVectors):
        optimizer.ds_opt_adam = _FullVectors(operator)


class _FullVectors:
    """CPUAdam's C++ part with the last elements of each tensor padded to a full vector.

    It computes elements after the last full vector one by one, with other fused multiply-adds. The rounding of a
    weight would depend on its offset, and the copies of a tied embedding on two pipeline stages would drift apart.
    """

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)

    def adam_update(self, *arguments: Any) -> None:
        """Update in place; the last four arguments are weights, gradients and both moments, contiguous."""
        *settings, weights, gradients, first, second = arguments
        tensors = [tensor.view(-1) for tensor in (weights, gradients, first, second)]
        length = tensors[0].numel()
        full = length - length % LANES
        if full:
            self._operator.adam_update(*settings, *(tensor[:full] for tensor in tensors))
        if full == length:
            return
        padded = [tensor.new_zeros(LANES) for tensor in tensors]
        for copy, tensor in zip(padded, tensors, strict=True):
            copy[: length - full] = tensor[full:]
        self._operator.adam_update(*settings, *padded)
        for copy, tensor in zip(padded, tensors, strict=True):
            tensor[full:] = copy[: length - full]
