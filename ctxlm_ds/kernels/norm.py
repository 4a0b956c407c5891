"""Normalisation over the last dimension, LayerNorm and RMSNorm: plain, torch's fused ones, apex's fused ones.

A second operation is a residual sum, its norm, and the dropout before or after: in steps, or one kernel on a GPU.
Shape letters: h width; `...` any leading dimensions. The spec of a Need is LAYER or RMS, or an AddNormSpec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.kernels.dropout import DropoutKernel
from ctxlm_ds.kernels.implementation import Implementation

LAYER, RMS = "layer", "rms"
LayerNormKernel = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
"""x [..., h], weight [h], bias [h] or None, eps -> [..., h] in x's type."""
RmsNormKernel = Callable[[Tensor, Tensor, float], Tensor]
"""x [..., h], weight [h], eps -> [..., h] in x's type."""


def reference_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Compute (x - mean) / sqrt(biased variance + eps) * weight + bias (Ba 2016), at least in float32."""
    compute = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(compute) - x.to(compute).mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    normalised = centred * torch.rsqrt(variance + eps)
    scaled = normalised * weight.to(compute)
    return (scaled if bias is None else scaled + bias.to(compute)).to(x.dtype)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean of squares + eps) * weight (Zhang & Sennrich 2019), at least in float32."""
    compute = torch.promote_types(x.dtype, torch.float32)
    mean_square = x.to(compute).square().mean(dim=-1, keepdim=True)
    return (x.to(compute) * torch.rsqrt(mean_square + eps) * weight.to(compute)).to(x.dtype)


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Call torch.nn.functional.layer_norm."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Call torch.nn.functional.rms_norm."""
    return F.rms_norm(x, weight.shape, weight, eps)


def apex_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Call NVIDIA apex's fused LayerNorm, which always adds a bias."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(x, weight, torch.zeros_like(weight) if bias is None else bias, weight.shape, eps)


def apex_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Call NVIDIA apex's fused RMSNorm."""
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    return fused_rms_norm_affine(x, weight, tuple(weight.shape), eps)


def why_apex_cannot_run(device_type: str) -> str | None:
    """Return the reason, or None if apex's norms run here."""
    if device_type != "cuda":
        return f"it needs a CUDA device, and this run is on {device_type}"
    try:
        import fused_layer_norm_cuda  # noqa: F401
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine  # noqa: F401
    except ImportError as error:
        return (
            f"apex.normalization with its CUDA extension is not importable ({error}); build NVIDIA apex from source, "
            "the PyPI package named apex is something else"
        )
    return None


class Drop(NamedTuple):
    """One dropout by key: the arguments of a DropoutKernel after the tensor."""

    p: float
    key: Tensor
    first: int = 0


DropRuns = list[tuple[slice, Drop]]
"""The dropout of each run of tokens of x [t, h], if not all are consecutive in the complete tensor."""


def in_runs(function: Callable[..., tuple[Tensor, ...]], runs: DropRuns, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Call function(*pieces, drop) with each run of tensors [..., h]; return its results joined, in their shape."""
    flat = [x.flatten(0, -2) for x in tensors]
    found = zip(*(function(*(x[run] for x in flat), drop) for run, drop in runs), strict=True)
    return tuple(torch.cat(pieces).view_as(tensors[0]) for pieces in found)


class AddNormKernel(Protocol):
    """Return the sum z = residual + drop(x) and norm(z), or with `drop_last` z = residual + x and drop(norm(z)).

    x, residual and both results are [..., h] of one type. `parameters` and `eps` are those of the norm after its
    tensor, (weight, bias or None) or (weight,). Without `drop` nothing is dropped.
    """

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        parameters: tuple[Tensor | None, ...],
        eps: float,
        drop: Drop | None = None,
        drop_last: bool = False,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class AddNormSpec:
    """The norm of a layer, and the run's kernels of the steps."""

    kind: str
    """LAYER or RMS."""
    width: int
    norm: Callable[..., Tensor]
    """A LayerNormKernel or RmsNormKernel."""
    dropout: DropoutKernel


@dataclass(frozen=True)
class AddNormSteps:
    """The operation as a dropout, a sum and a norm, each by the run's kernel."""

    spec: AddNormSpec

    def __call__(
        self, x: Tensor, residual: Tensor, parameters: tuple[Any, ...], eps: float,
        drop: Drop | None = None, drop_last: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if drop is not None and not drop_last:
            x = self.spec.dropout(x, *drop)
        z = residual + x
        y = self.spec.norm(z, *parameters, eps)
        return z, y if drop is None or not drop_last else self.spec.dropout(y, *drop)


IMPLEMENTATIONS = (
    Implementation(
        "apex",
        lambda need: {LAYER: apex_layer_norm, RMS: apex_rms_norm}[need.spec],
        lambda need: why_apex_cannot_run(need.device_type),
    ),
    Implementation("torch", lambda need: {LAYER: torch_layer_norm, RMS: torch_rms_norm}[need.spec]),
    Implementation("reference", lambda need: {LAYER: reference_layer_norm, RMS: reference_rms_norm}[need.spec]),
)
ADD_NORM = (Implementation("torch", lambda need: AddNormSteps(need.spec)),)
