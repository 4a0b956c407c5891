"""LayerNorm kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ctxlm_ds.kernels.layer_norm import (
    LayerNormKernel,
    apex_layer_norm,
    reference_layer_norm,
    torch_layer_norm,
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


def values_and_gradients(kernel: LayerNormKernel, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, shift: float) -> Tensor:
        value = torch.randn(shape, generator=generator, dtype=torch.float64) + shift
        return value.to(torch.bfloat16).to(device, dtype).requires_grad_()

    leaves = [draw(2, 3, WIDTH, shift=3.0), draw(WIDTH, shift=1.0), draw(WIDTH, shift=0.0)]
    upstream = draw(2, 3, WIDTH, shift=0.0).detach()
    output = kernel(*leaves, EPS)
    output.backward(upstream)
    assert output.dtype == dtype
    return [output.detach().double().cpu(), *(leaf.grad.double().cpu() for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("kernel", [reference_layer_norm, torch_layer_norm])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_values_and_gradients(kernel: LayerNormKernel, dtype: torch.dtype, tolerance: float) -> None:
    expected = values_and_gradients(in_float64, torch.float64)
    actual = values_and_gradients(kernel, dtype)
    assert len(actual) == len(expected) == 4
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(why_apex_cannot_run("cuda") is not None, reason="needs NVIDIA apex with its CUDA extension")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_apex_on_cuda(dtype: torch.dtype, tolerance: float) -> None:
    expected = values_and_gradients(in_float64, torch.float64)
    actual = values_and_gradients(apex_layer_norm, dtype, device="cuda")
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_the_reference_computes_half_precision_in_float32() -> None:
    x = torch.full((1, WIDTH), 300.0, dtype=torch.float16)
    x[0, 0] = 301.0
    ones, zeros = torch.ones(WIDTH, dtype=torch.float16), torch.zeros(WIDTH, dtype=torch.float16)
    expected = in_float64(x.double(), ones.double(), zeros.double(), EPS)
    torch.testing.assert_close(reference_layer_norm(x, ones, zeros, EPS).double(), expected, rtol=1e-3, atol=1e-3)
