"""Triton's gated activations against float64 and torch's sequence."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.kernels import bias_gelu
from tests.unit.kernels.triton.interpreter import in_interpreter

pytestmark = pytest.mark.long


def with_gradient(kernel: bias_gelu.GatedKernel, x: torch.Tensor, activation: str) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    out = kernel(leaf, activation)
    upstream = torch.linspace(-2, 2, out.numel()).to(torch.bfloat16).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaf, upstream)]


@pytest.mark.parametrize("shape", [(3, 2, 2 * 257), (1, 2 * 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", bias_gelu.REFERENCE_ACTIVATIONS)
@in_interpreter
def test_values_and_gradients_are_those_of_float64(activation: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from ctxlm_ds.kernels.triton.activation import triton_gated

    x = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    exact = with_gradient(bias_gelu.reference_gated, x.double(), activation)
    found = with_gradient(triton_gated, x, activation)
    plain = with_gradient(bias_gelu.torch_gated, x, activation)
    for one, other, wanted in zip(found, plain, exact, strict=True):
        errors = [((y.double() - wanted).abs().max() / wanted.abs().max()).item() for y in (one, other)]
        assert one.dtype == dtype and one.shape == wanted.shape
        assert errors[0] <= (2e-6 if dtype == torch.float32 else errors[1])


@pytest.mark.parametrize("activation", bias_gelu.REFERENCE_ACTIVATIONS)
@in_interpreter
def test_large_numbers_give_no_others_than_torch_in_float64(activation: str) -> None:
    """On some CPUs its gelu of infinity in fp32 is not a number."""
    from ctxlm_ds.kernels.triton.activation import triton_gated

    gates = torch.tensor([200.0, -200.0, -1e4, 0.0, float("inf"), float("nan")])
    x = torch.cat([gates, torch.ones(6)])[None]
    wanted = bias_gelu.torch_gated(x.double(), activation).float()
    torch.testing.assert_close(triton_gated(x, activation), wanted, equal_nan=True)


@in_interpreter
def test_a_transposed_input_and_gradient_are_read_by_their_places() -> None:
    from ctxlm_ds.kernels.triton.activation import triton_gated

    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).t().requires_grad_()
    upstream = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).t()
    results = []
    for kernel in (triton_gated, bias_gelu.torch_gated):
        out = kernel(x, "silu")
        results.append([out.detach(), *torch.autograd.grad(out, x, upstream)])
    torch.testing.assert_close(*results)


def test_the_backward_pass_keeps_the_input_alone() -> None:
    from ctxlm_ds.kernels.triton.activation import triton_gated

    x, kept = torch.empty(4, 64, device="meta", requires_grad=True), []

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        triton_gated(x, "gelu")
    assert [saved.shape for saved in kept] == [x.shape]
