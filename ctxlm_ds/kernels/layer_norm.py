"""Layer normalisation over the last dimension (Ba 2016): plain, torch's fused one, apex's fused one.

Shape letters: h width; `...` any leading dimensions.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class LayerNormKernel(Protocol):
    """x [..., h], weight [h], bias [h] -> [..., h] in x's type."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor: ...


def reference_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(biased variance + eps) * weight + bias, at least in float32."""
    compute = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(compute) - x.to(compute).mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    normalised = centred * torch.rsqrt(variance + eps)
    return (normalised * weight.to(compute) + bias.to(compute)).to(x.dtype)


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """torch.nn.functional.layer_norm."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def apex_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """NVIDIA apex's fused kernel."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(x, weight, bias, tuple(weight.shape), eps)


def why_apex_cannot_run(device_type: str) -> str | None:
    """The reason, or None where apex's LayerNorm runs here."""
    if device_type != "cuda":
        return f"it needs a CUDA device, and this run is on {device_type}"
    try:
        import fused_layer_norm_cuda  # noqa: F401
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine  # noqa: F401
    except ImportError as error:
        return (
            f"apex.normalization with its CUDA extension is not importable ({error}); build NVIDIA apex from source, "
            "the PyPI package named apex is something else"
        )
    return None
