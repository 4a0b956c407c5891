"""Activations: after a linear layer and its bias, or as a gate; plain formulas, torch's functions, or compiled.

The product belongs to the operation because torch adds the bias inside it while the compiled kernel adds it outside.
Shape letters: i inputs, o outputs of the layer; `...` any leading dimensions. The spec of a Need is GATED or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.kernels.implementation import Implementation, compile_later, compiled_row
from ctxlm_ds.kernels.linear import LinearKernel, torch_linear

GATED = "gated"
GatedKernel = Callable[[Tensor, str], Tensor]
"""x [..., 2 i], activation -> activation(first half) * second half, [..., i] (Shazeer 2020)."""


class BiasGeluKernel(Protocol):
    """x [..., i], weight [o, i], bias [o] or None, activation of REFERENCE_ACTIVATIONS -> [..., o].

    `linear` computes the product (a tensor-parallel one, for example).
    """

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, linear: LinearKernel = torch_linear
    ) -> Tensor: ...


Activation = Callable[[Tensor], Tensor]
REFERENCE_ACTIVATIONS: dict[str, Activation] = {
    "gelu": lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "silu": lambda x: x / (1.0 + torch.exp(-x)),
}
"""Hendrycks & Gimpel 2016: x·Φ(x), its tanh approximation, and x·σ(x)."""
TORCH_ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def _after_linear(activations: Mapping[str, Activation]) -> BiasGeluKernel:
    def kernel(
        x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, linear: LinearKernel = torch_linear
    ) -> Tensor:
        return activations[activation](linear(x, weight, bias))

    return kernel


def _as_gate(activations: Mapping[str, Activation]) -> GatedKernel:
    def kernel(x: Tensor, activation: str) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return activations[activation](gate) * value

    return kernel


reference_bias_gelu, reference_gated = _after_linear(REFERENCE_ACTIVATIONS), _as_gate(REFERENCE_ACTIVATIONS)
# torch adds the bias inside the product.
torch_bias_gelu, torch_gated = _after_linear(TORCH_ACTIVATIONS), _as_gate(TORCH_ACTIVATIONS)
compiled_gated: GatedKernel = compile_later(torch_gated)


@compile_later
def _add_and_activate(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return TORCH_ACTIVATIONS[activation](x if bias is None else x + bias)


def compiled_bias_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, linear: LinearKernel = torch_linear
) -> Tensor:
    """Compute the product, then bias and activation in one kernel."""
    return _add_and_activate(linear(x, weight, None), bias, activation)


IMPLEMENTATIONS = (
    Implementation("torch", lambda need: torch_gated if need.spec == GATED else torch_bias_gelu),
    compiled_row(lambda need: compiled_gated if need.spec == GATED else compiled_bias_gelu),
    Implementation("reference", lambda need: reference_gated if need.spec == GATED else reference_bias_gelu),
)
