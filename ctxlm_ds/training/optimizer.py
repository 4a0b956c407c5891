"""Optimizers: parameter groups, the choice of an implementation, and its step count in one form."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ctxlm_ds.errors import ConfigError, KernelError
from ctxlm_ds.parallel.parameters import ParameterFacts
from ctxlm_ds.recipe.schema import OptimizerConfig
from ctxlm_ds.training.cpu_adam import LANES
from ctxlm_ds.training.lamb import Lamb

AdamFactory = Callable[..., torch.optim.Optimizer]
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class OptimizerPlace:
    """Where the optimizer will work."""

    device_type: str
    """`cpu` or `cuda`: where the fp32 weights are."""
    zero_stage: int
    offloaded: bool
    """The fp32 weights lie in CPU memory while the model is on the accelerator (or ZeRO-Offload was asked for)."""


def parameter_groups(
    named: Iterable[tuple[str, torch.nn.Parameter]], facts: Mapping[str, ParameterFacts], weight_decay: float
) -> list[dict[str, Any]]:
    """Split the parameters into two groups: those that are decayed, and those that are not."""
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in named:
        (decayed if facts[name].decays else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    config: OptimizerConfig,
    kernel: str,
    groups: list[dict[str, Any]],
    place: OptimizerPlace,
    deepspeed_adam: Callable[[bool], AdamFactory],
) -> tuple[torch.optim.Optimizer, str]:
    """The optimizer and one line that says which implementation was chosen.

    `deepspeed_adam(offloaded)` gives DeepSpeed's CPUAdam or FusedAdam class (or raises KernelError).

    Raises:
        KernelError: an implementation asked for by name cannot run here.
        ConfigError: the implementation cannot be exact under this ZeRO stage.
    """
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
    if config.name == "lamb":
        return _build_lamb(kernel, groups, settings, place)
    chosen = _adam_implementation(kernel, place, deepspeed_adam)
    if chosen == "deepspeed":
        extra = {"adamw_mode": True} if place.offloaded else {"adam_w_mode": True}
        return deepspeed_adam(place.offloaded)(groups, **settings, **extra), "adamw=deepspeed"
    if chosen == "apex":
        return _apex_optimizer("FusedAdam")(groups, adam_w_mode=True, **settings), "adamw=apex"
    if chosen == "torch":
        return torch.optim.AdamW(groups, fused=True, **settings), "adamw=torch(fused)"
    return torch.optim.AdamW(groups, foreach=False, fused=False, **settings), "adamw=reference"


def _adam_implementation(kernel: str, place: OptimizerPlace, deepspeed_adam: Callable[[bool], AdamFactory]) -> str:
    if place.offloaded:
        if kernel in ("torch", "apex"):
            raise ConfigError(
                f"kernels.optimizer is {kernel}, but ZeRO-Offload keeps the optimizer in CPU memory, where DeepSpeed's "
                "CPUAdam runs; set kernels.optimizer: auto or deepspeed"
            )
        return "reference" if kernel == "reference" else "deepspeed"
    if kernel != "auto":
        return kernel
    if place.device_type == "cpu":
        return "torch"
    try:
        deepspeed_adam(False)
    except KernelError:
        return "torch"
    return "deepspeed"


def _build_lamb(
    kernel: str, groups: list[dict[str, Any]], settings: dict[str, Any], place: OptimizerPlace
) -> tuple[torch.optim.Optimizer, str]:
    if kernel == "apex":
        if place.zero_stage > 0:
            raise ConfigError(
                f"kernels.optimizer is apex with lamb under ZeRO stage {place.zero_stage}: FusedLAMB would take its "
                "trust ratios from each rank's shard, not from whole parameters; set kernels.optimizer: auto"
            )
        # The engine clips; to FusedLAMB a bound of 0 would mean gradients divided by infinity.
        return _apex_optimizer("FusedLAMB")(groups, max_grad_norm=math.inf, **settings), "lamb=apex"
    if kernel in ("torch", "deepspeed"):
        raise KernelError(
            f"kernels.optimizer is {kernel}, which has no LAMB with exact trust ratios under ZeRO; set "
            "kernels.optimizer: auto"
        )
    return Lamb(groups, **settings), "lamb=native"


def _apex_optimizer(name: str) -> AdamFactory:
    try:
        module = importlib.import_module("apex.optimizers")
        return getattr(module, name)
    except (ImportError, AttributeError) as error:
        raise KernelError(
            f"kernels.optimizer is apex, but NVIDIA apex's {name} cannot be imported ({error}); install apex from "
            "source (docs/install.md) or set kernels.optimizer: auto"
        ) from error


def completed_updates(optimizer: torch.optim.Optimizer) -> int:
    """Updates applied so far (skipped fp16 steps do not count).

    The largest count that is kept anywhere: of a group's tensors DeepSpeed's FusedAdam counts for the last alone.
    """
    kept = [*optimizer.state.values(), *optimizer.param_groups]
    return max((int(holder["step"]) for holder in kept if "step" in holder), default=0)


def restore_state(
    optimizer: torch.optim.Optimizer, owners: Iterable[torch.Tensor], updates: int, kinds: Iterable[str] = MOMENTS
) -> None:
    """Give every owner tensor zeroed moments and the step count, in the form this optimizer keeps them."""
    names = tuple(kinds)
    tensor_step = type(optimizer).__module__.startswith("torch.optim.")
    for owner in owners:
        state: dict[str, Any] = {name: torch.zeros_like(owner, requires_grad=False) for name in names}
        state["step"] = torch.tensor(float(updates)) if tensor_step else updates
        if tensor_step and optimizer.defaults.get("fused") and owner.device.type != "cpu":
            state["step"] = state["step"].to(owner.device)
        optimizer.state[owner] = state
    for group in optimizer.param_groups:
        if "step" in group or _counts_in_group(optimizer):
            group["step"] = updates
    if hasattr(optimizer, "ds_opt_adam"):
        _replay_bias_correction(optimizer, updates)


def forget_state(optimizer: torch.optim.Optimizer, owners: Iterable[torch.Tensor]) -> None:
    """Drop moments and step counts: the next update makes them anew, as the first of a run does."""
    for owner in owners:
        optimizer.state.pop(owner, None)
    for group in optimizer.param_groups:
        group.pop("step", None)


def _counts_in_group(optimizer: torch.optim.Optimizer) -> bool:
    """apex's fused optimizers keep one step count a group; DeepSpeed's FusedAdam one a parameter."""
    return type(optimizer).__module__.startswith("apex.")


def _replay_bias_correction(optimizer: Any, updates: int) -> None:
    """Bring DeepSpeed's CPUAdam to the rounding that it would have had without an interruption.

    Its C++ half multiplies the powers of beta up from step to step in fp32 and hides them; begun anew, it takes them
    from pow(), which rounds otherwise. Updates at rate 0 take it there (1.5 s for a million).
    """
    group = optimizer.param_groups[0]
    beta1, beta2 = group["betas"]
    scratch = [torch.zeros(LANES) for _ in range(4)]
    for step in range(1, updates + 1):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id, step, 0.0, beta1, beta2, group["eps"], 0.0, group["bias_correction"], *scratch
        )
