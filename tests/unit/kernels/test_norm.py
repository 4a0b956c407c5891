"""LayerNorm and RMSNorm kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ctxlm_ds.kernels.norm import (
    LayerNormKernel,
    RmsNormKernel,
    apex_layer_norm,
    apex_rms_norm,
    reference_layer_norm,
    reference_rms_norm,
    torch_layer_norm,
    torch_rms_norm,
    why_apex_cannot_run,
)

WIDTH, EPS = 24, 1e-5
TOLERANCES = [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)]


def in_float64(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The definition (Ba 2016), one vector at a time."""
    vectors = []
    for vector in x.flatten(0, -2):
        mean = vector.sum() / WIDTH
        variance = ((vector - mean) ** 2).sum() / WIDTH
        vectors.append((vector - mean) / (variance + eps) ** 0.5 * weight + bias)
    return torch.stack(vectors).view_as(x)


def rms_in_float64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition (Zhang & Sennrich 2019), one vector at a time."""
    vectors = [vector / ((vector**2).sum() / WIDTH + eps) ** 0.5 * weight for vector in x.flatten(0, -2)]
    return torch.stack(vectors).view_as(x)


Kernel = LayerNormKernel | RmsNormKernel
ORACLES: dict[Kernel, Kernel] = {
    reference_layer_norm: in_float64,
    torch_layer_norm: in_float64,
    apex_layer_norm: in_float64,
    reference_rms_norm: rms_in_float64,
    torch_rms_norm: rms_in_float64,
    apex_rms_norm: rms_in_float64,
}


def values_and_gradients(kernel: Kernel, dtype: torch.dtype, with_bias: bool, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, shift: float) -> Tensor:
        value = torch.randn(shape, generator=generator, dtype=torch.float64) + shift
        return value.to(torch.bfloat16).to(device, dtype).requires_grad_()

    leaves = [draw(2, 3, WIDTH, shift=3.0), draw(WIDTH, shift=1.0), draw(WIDTH, shift=0.0)]
    leaves = leaves if with_bias else leaves[:2]
    upstream = draw(2, 3, WIDTH, shift=0.0).detach()
    output = kernel(*leaves, EPS)
    output.backward(upstream)
    assert output.dtype == dtype
    return [output.detach().double().cpu(), *(leaf.grad.double().cpu() for leaf in leaves if leaf.grad is not None)]


def compare(kernel: Kernel, dtype: torch.dtype, tolerance: float, device: str = "cpu") -> None:
    with_bias = ORACLES[kernel] is in_float64
    expected = values_and_gradients(ORACLES[kernel], torch.float64, with_bias)
    actual = values_and_gradients(kernel, dtype, with_bias, device)
    assert len(actual) == len(expected) == (4 if with_bias else 3)
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", [reference_layer_norm, torch_layer_norm, reference_rms_norm, torch_rms_norm])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_values_and_gradients(kernel: Kernel, dtype: torch.dtype, tolerance: float) -> None:
    compare(kernel, dtype, tolerance)


@pytest.mark.skipif(why_apex_cannot_run("cuda") is not None, reason="needs NVIDIA apex with its CUDA extension")
@pytest.mark.parametrize("kernel", [apex_layer_norm, apex_rms_norm])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_apex_on_cuda(kernel: Kernel, dtype: torch.dtype, tolerance: float) -> None:
    compare(kernel, dtype, tolerance, device="cuda")


def test_the_reference_computes_half_precision_in_float32() -> None:
    x = torch.full((1, WIDTH), 300.0, dtype=torch.float16)
    x[0, 0] = 301.0
    ones, zeros = torch.ones(WIDTH, dtype=torch.float16), torch.zeros(WIDTH, dtype=torch.float16)
    expected = in_float64(x.double(), ones.double(), zeros.double(), EPS)
    torch.testing.assert_close(reference_layer_norm(x, ones, zeros, EPS).double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kernel", [reference_layer_norm, torch_layer_norm])
def test_a_layer_norm_without_bias_adds_nothing(kernel: LayerNormKernel) -> None:
    x, weight = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2)), torch.linspace(0.5, 2, WIDTH)
    torch.testing.assert_close(
        kernel(x, weight, None, EPS), kernel(x, weight, torch.zeros(WIDTH), EPS), rtol=1e-6, atol=1e-6
    )
