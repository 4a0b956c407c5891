"""Matrix product of a linear layer: torch's, or computed in float32 on CPUs without bfloat16 units.

Shape letters: i inputs, o outputs of the layer; `...` any leading dimensions.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.kernels.implementation import Implementation, Need


class LinearKernel(Protocol):
    """x [..., i], weight [o, i], bias [o] or None -> [..., o], all of one floating type."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


def torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Call torch.nn.functional.linear."""
    return F.linear(x, weight, bias)


def float32_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the same product in float32 and round it to x's type, forward and backward."""
    product = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return product.to(x.dtype)


def bf16_is_emulated(device_type: str) -> bool:
    """Return True if bfloat16 products have no vector code here (x86 below AVX-512; 10 to 50 times slower)."""
    return device_type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def computes_in_float32(need: Need) -> bool:
    """Return True if a product of the activations is faster in float32."""
    return need.dtype == torch.bfloat16 and bf16_is_emulated(need.device_type)


IMPLEMENTATIONS = (
    Implementation("float32", lambda need: float32_linear, suits=computes_in_float32),
    Implementation("torch", lambda need: torch_linear),
)
