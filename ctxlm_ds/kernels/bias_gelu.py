"""A linear layer with its bias and activation: plain formulas, torch's activations, bias and activation compiled.

The product belongs to the operation because torch adds the bias inside it while the compiled kernel adds it outside.
Shape letters: i inputs, o outputs of the layer; `...` any leading dimensions. The spec of a Need is
the LinearKernel that computes the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.kernels.implementation import Implementation, Need
from ctxlm_ds.kernels.linear import LinearKernel, torch_linear


class BiasGeluKernel(Protocol):
    """x [..., i], weight [o, i], bias [o], activation `gelu`, `gelu_tanh` or `relu` -> [..., o]."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor: ...

    def with_linear(self, linear: LinearKernel) -> BiasGeluKernel:
        """Return the same kernel around another product (a tensor-parallel one)."""
        ...


def _erf_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


Activation = Callable[[Tensor], Tensor]
REFERENCE_ACTIVATIONS: dict[str, Activation] = {"gelu": _erf_gelu, "gelu_tanh": _tanh_gelu, "relu": _relu}
TORCH_ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class ReferenceBiasGelu:
    """Activations by their formulas (Hendrycks & Gimpel 2016: x·Φ(x), and its tanh approximation)."""

    def __init__(self, linear: LinearKernel = torch_linear) -> None:
        self.linear = linear

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
        return REFERENCE_ACTIVATIONS[activation](self.linear(x, weight, bias))

    def with_linear(self, linear: LinearKernel) -> ReferenceBiasGelu:
        """Return the same kernel around another product."""
        return ReferenceBiasGelu(linear)


class TorchBiasGelu:
    """The bias inside the product, then torch's activation."""

    def __init__(self, linear: LinearKernel = torch_linear) -> None:
        self.linear = linear

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
        return TORCH_ACTIVATIONS[activation](self.linear(x, weight, bias))

    def with_linear(self, linear: LinearKernel) -> TorchBiasGelu:
        """Return the same kernel around another product."""
        return TorchBiasGelu(linear)


@lru_cache
def _compiled_bias_activation(activation: str) -> Callable[[Tensor, Tensor], Tensor]:
    def bias_activation(x: Tensor, bias: Tensor) -> Tensor:
        return TORCH_ACTIVATIONS[activation](x + bias)

    return torch.compile(bias_activation, dynamic=False)


class CompiledBiasGelu:
    """The product, then bias and activation in one kernel made by torch.compile (some seconds at the first step)."""

    def __init__(self, linear: LinearKernel = torch_linear) -> None:
        self.linear = linear

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
        return _compiled_bias_activation(activation)(self.linear(x, weight, None), bias)

    def with_linear(self, linear: LinearKernel) -> CompiledBiasGelu:
        """Return the same kernel around another product."""
        return CompiledBiasGelu(linear)


def why_compiled_cannot_run(device_type: str) -> str | None:
    """Return the reason, or None if torch.compile can make kernels here."""
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "torch.compile needs a C++ compiler on the CPU, and none is found (install g++ or set CXX)"
        return None
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"torch.compile needs triton on {device_type} ({error})"
    return None


def _why_not_compiled(need: Need) -> str | None:
    return why_compiled_cannot_run(need.device_type)


IMPLEMENTATIONS = (
    Implementation("torch", lambda need: TorchBiasGelu(need.spec)),
    Implementation("compiled", lambda need: CompiledBiasGelu(need.spec), _why_not_compiled),
    Implementation("reference", lambda need: ReferenceBiasGelu(need.spec)),
)
