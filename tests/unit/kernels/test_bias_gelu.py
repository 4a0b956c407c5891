"""Linear-bias-activation kernels against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ctxlm_ds.kernels.bias_gelu import (
    BiasGeluKernel,
    GatedKernel,
    compiled_bias_gelu,
    compiled_gated,
    reference_bias_gelu,
    reference_gated,
    torch_bias_gelu,
    torch_gated,
)
from ctxlm_ds.kernels.implementation import why_compiled_cannot_run

ACTIVATIONS = ("gelu", "gelu_tanh", "relu")
INPUTS, OUTPUTS = 12, 20
TOLERANCES = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


def scalar_activation(x: float, activation: str) -> float:
    if activation == "gelu":
        return x * 0.5 * math.erfc(-x / math.sqrt(2))
    if activation == "gelu_tanh":
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return max(x, 0.0)


def leaves(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,))
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [value.to(torch.bfloat16).to(dtype).requires_grad_() for value in values]


def values_and_gradients(kernel: BiasGeluKernel, dtype: torch.dtype, activation: str) -> list[Tensor]:
    inputs = leaves(dtype)
    output = kernel(*inputs, activation)
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
    output.backward(weights.to(dtype))
    assert output.dtype == dtype
    return [output.detach().double(), *(leaf.grad.double() for leaf in inputs if leaf.grad is not None)]


@pytest.mark.parametrize(("activation", "jump"), [("relu", 1.0), ("gelu", 0.0), ("gelu_tanh", 0.0)])
def test_another_rounding_turns_a_unit_of_relu_on(activation: str, jump: float) -> None:
    """1 + 2^-24 - 1 is 0 in one order and 2^-24 in the other."""
    one, small, gradients = torch.ones(1, 1), torch.full((1, 1), 2.0**-24), []
    for total in ((one + small) - one, one + (small - one)):
        total.requires_grad_()
        reference_bias_gelu(total, torch.ones(1, 1), None, activation).backward()
        gradients.append(float(total.grad))
    assert gradients[1] - gradients[0] == pytest.approx(jump, abs=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_values_are_those_of_the_standard_library(activation: str) -> None:
    x, weight, bias = (leaf.detach() for leaf in leaves(torch.float64))
    expected = [scalar_activation(value, activation) for value in (x @ weight.T + bias).flatten().tolist()]
    actual = reference_bias_gelu(x, weight, bias, activation).flatten().tolist()
    assert actual == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_gradients_are_those_of_finite_differences(activation: str) -> None:
    inputs = leaves(torch.float64)
    assert torch.autograd.gradcheck(lambda x, w, b: reference_bias_gelu(x, w, b, activation), inputs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_torch_values_and_gradients(dtype: torch.dtype, tolerance: float, activation: str) -> None:
    compare(torch_bias_gelu, dtype, tolerance, activation)


@pytest.mark.skipif(why_compiled_cannot_run("cpu") is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("activation", ["gelu", *(pytest.param(x, marks=pytest.mark.soak) for x in ACTIVATIONS[1:])])
def test_compiled_values_and_gradients(activation: str) -> None:
    compare(compiled_bias_gelu, torch.float32, 1e-5, activation)


def compare(kernel: BiasGeluKernel, dtype: torch.dtype, tolerance: float, activation: str) -> None:
    expected = values_and_gradients(reference_bias_gelu, torch.float64, activation)
    actual = values_and_gradients(kernel, dtype, activation)
    assert len(actual) == len(expected) == 4
    assert_near(actual, expected, tolerance)


def assert_near(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())


def gated_values_and_gradient(kernel: GatedKernel, dtype: torch.dtype, activation: str) -> list[Tensor]:
    x = leaves(torch.float64)[0].detach().to(torch.bfloat16).to(dtype).requires_grad_()
    output = kernel(x, activation)
    upstream = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output).to(dtype)
    (gradient,) = torch.autograd.grad(output, x, upstream)
    assert output.dtype == dtype and output.shape == (*x.shape[:-1], INPUTS // 2)
    return [output.detach().double(), gradient.double()]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_gated_values_and_gradients(dtype: torch.dtype, tolerance: float, activation: str) -> None:
    expected = gated_values_and_gradient(reference_gated, torch.float64, activation)
    first, second = leaves(torch.float64)[0].detach()[0, 0].chunk(2)
    by_hand = [scalar_activation(a, activation) * b for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    assert expected[0][0, 0].tolist() == pytest.approx(by_hand, abs=1e-12)
    assert_near(gated_values_and_gradient(torch_gated, dtype, activation), expected, tolerance)


@pytest.mark.long
@pytest.mark.skipif(why_compiled_cannot_run("cpu") is not None, reason="needs a C++ compiler")
def test_compiled_gate_has_the_same_values_and_gradient() -> None:
    expected = gated_values_and_gradient(reference_gated, torch.float64, "gelu")
    assert_near(gated_values_and_gradient(compiled_gated, torch.float32, "gelu"), expected, 1e-5)


@pytest.mark.parametrize("kernel", [torch_bias_gelu, reference_bias_gelu])
def test_no_bias_is_a_bias_of_zeros(kernel: BiasGeluKernel) -> None:
    x, weight, bias = (leaf.detach() for leaf in leaves(torch.float64))
    assert torch.equal(kernel(x, weight, None, "gelu"), kernel(x, weight, torch.zeros_like(bias), "gelu"))
