"""Parameter groups, the choice of an optimizer's implementation, and its states in one form."""

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
from ctxlm_ds.training.optimizers.adafactor import Adafactor
from ctxlm_ds.training.optimizers.adagrad import Adagrad
from ctxlm_ds.training.optimizers.lamb import Lamb
from ctxlm_ds.training.optimizers.muon import Muon
from ctxlm_ds.training.optimizers.stable_adamw import StableAdamW
from ctxlm_ds.training.optimizers.whole_parameters import MOMENTS

AdamFactory = Callable[..., torch.optim.Optimizer]
LANES = 64
"""fp32 elements of the longest vector that a build of CPUAdam uses (SVE, 2,048 bits)."""


@dataclass(frozen=True, slots=True)
class OptimizerPlace:
    """The device and the ZeRO stage that an optimizer works under."""

    device_type: str
    """`cpu` or `cuda`: the device of the fp32 weights."""
    zero_stage: int
    offloaded: bool
    """True if the fp32 weights are in CPU memory while the model is on the accelerator (or ZeRO-Offload is set)."""


def parameter_groups(
    named: Iterable[tuple[str, torch.nn.Parameter]], facts: Mapping[str, ParameterFacts], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Split the parameters into weights (matrices, tables) and the rest (biases, LayerNorm), and for Muon its own."""
    matrices: list[torch.nn.Parameter] = []
    weights: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in named:
        if config.orthogonalizes and facts[name].matrix:
            matrices.append(parameter)
        else:
            (weights if facts[name].decays else rest).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": config.weight_decay if config.decay_biases else 0.0},
    ]
    if config.name == "lamb":
        for group, takes_ratio in zip(groups, (True, config.trust_ratio == "all"), strict=True):
            group["trust_ratio"] = takes_ratio
    factor = (config.matrix_learning_rate or config.learning_rate) / config.learning_rate
    own = {"params": matrices, "weight_decay": config.weight_decay, "matrices": True, "rate_factor": factor}
    return [group for group in (own, *groups) if group["params"]]


def moments_of(facts: ParameterFacts, config: OptimizerConfig) -> tuple[str, ...]:
    """Return the names of a parameter's moments; `config` is not that of an optimizer of the DeepSpeed JSON."""
    if config.num_moments == 1:
        return MOMENTS[1:]
    return MOMENTS[:1] if config.orthogonalizes and facts.matrix else MOMENTS


def build_optimizer(
    config: OptimizerConfig,
    kernel: str,
    groups: list[dict[str, Any]],
    place: OptimizerPlace,
    deepspeed_adam: Callable[[bool], AdamFactory],
) -> tuple[torch.optim.Optimizer, str]:
    """Build the optimizer.

    Args:
        config: the recipe's section.
        kernel: the recipe's `kernels.optimizer`.
        groups: from `parameter_groups`.
        place: device and ZeRO stage.
        deepspeed_adam: returns DeepSpeed's CPUAdam (True) or FusedAdam class, or raises KernelError.

    Returns:
        The optimizer, and the chosen implementation as it is logged.

    Raises:
        KernelError: the requested implementation cannot run here.
        ConfigError: the implementation cannot be exact under this ZeRO stage.
    """
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
    if config.name == "lamb":
        return _build_lamb(kernel, groups, settings, place)
    if config.name in ("muon", "stable_adamw", "adafactor", "adagrad") and kernel not in ("auto", "reference"):
        raise KernelError(
            f"kernels.optimizer is {kernel}, which has no {config.name} that is exact under ZeRO; set "
            "kernels.optimizer: auto"
        )
    if config.name == "adafactor":
        return Adafactor(groups, lr=config.learning_rate), "adafactor=native"
    if config.name == "adagrad":
        start = config.initial_accumulator
        return Adagrad(groups, lr=config.learning_rate, eps=config.eps, initial_accumulator=start), "adagrad=native"
    if config.name == "stable_adamw":
        return StableAdamW(groups, **settings), "stable_adamw=native"
    if config.name == "muon":
        muon = Muon(groups, **settings, momentum=config.momentum, matrix_scale=config.matrix_scale)
        return muon, "muon=native"
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
                "trust ratios from each rank's shard, not from complete parameters; set kernels.optimizer: auto"
            )
        all_take_ratios = all(group["trust_ratio"] for group in groups)
        if not all_take_ratios and any(group["trust_ratio"] != (group["weight_decay"] != 0.0) for group in groups):
            raise ConfigError(
                "kernels.optimizer is apex with lamb: FusedLAMB takes a trust ratio for exactly the parameters that "
                "are decayed, or for all; set kernels.optimizer: auto, or optimizer.trust_ratio: all"
            )
        # The engine clips. FusedLAMB reads a bound of 0 as gradients divided by infinity.
        fused = _apex_optimizer("FusedLAMB")
        return fused(groups, max_grad_norm=math.inf, use_nvlamb=all_take_ratios, **settings), "lamb=apex"
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
