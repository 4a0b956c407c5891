"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) by the fastest implementation of the place."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

from ctxlm_ds.errors import ConfigError, KernelError
from ctxlm_ds.training.optimizers.base import AdamFactory, AdamSection, Optimizer, OptimizerPlace

if TYPE_CHECKING:
    import torch


class AdamWSection(AdamSection):
    """AdamW with decoupled weight decay."""

    kernels: ClassVar = ("auto", "reference", "torch", "deepspeed", "apex")
    json_types: ClassVar = ("adam",)

    name: str = "adamw"

    def follows_width(self) -> bool:
        return True


class AdamW(Optimizer):
    """AdamW of torch, DeepSpeed or apex."""

    section = AdamWSection

    def build(
        self, groups: list[dict[str, Any]], kernel: str, place: OptimizerPlace
    ) -> tuple[torch.optim.Optimizer, str]:
        import torch

        settings = adam_arguments(self.settings)
        chosen = _implementation(kernel, place)
        if chosen == "deepspeed":
            extra = {"adamw_mode": True} if place.offloaded else {"adam_w_mode": True}
            return place.adam()(groups, **settings, **extra), "adamw=deepspeed"
        if chosen == "apex":
            return apex_optimizer("FusedAdam")(groups, adam_w_mode=True, **settings), "adamw=apex"
        if chosen == "torch":
            return torch.optim.AdamW(groups, fused=True, **settings), "adamw=torch(fused)"
        return torch.optim.AdamW(groups, foreach=False, fused=False, **settings), "adamw=reference"


def adam_arguments(settings: AdamSection) -> dict[str, Any]:
    return {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}


def _implementation(kernel: str, place: OptimizerPlace) -> str:
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
        place.adam()
    except KernelError:
        return "torch"
    return "deepspeed"


def apex_optimizer(name: str) -> AdamFactory:
    """Import an optimizer of NVIDIA apex, or raise KernelError."""
    try:
        return getattr(importlib.import_module("apex.optimizers"), name)
    except (ImportError, AttributeError) as error:
        raise KernelError(
            f"kernels.optimizer is apex, but NVIDIA apex's {name} cannot be imported ({error}); install apex from "
            "source (docs/install.md) or set kernels.optimizer: auto"
        ) from error
