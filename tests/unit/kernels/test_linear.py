"""Linear kernels: products of half precision added up in float32, and the layer that needs none of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ctxlm_ds.kernels.bias_gelu import BiasGeluKernel, reference_bias_gelu, torch_bias_gelu
from ctxlm_ds.kernels.linear import LinearKernel, float32_linear, torch_linear
from tests.unit.kernels.test_bias_gelu import compare, leaves


@pytest.mark.parametrize(
    "kernel", [partial(torch_bias_gelu, linear=float32_linear), partial(reference_bias_gelu, linear=float32_linear)]
)
def test_products_in_float32_give_bf16_results(kernel: BiasGeluKernel) -> None:
    compare(kernel, torch.bfloat16, 2e-2, "gelu")


@pytest.mark.parametrize("kernel", [torch_linear, float32_linear])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_kernels(kernel: LinearKernel, with_bias: bool) -> None:
    x, weight, bias = leaves(torch.bfloat16)
    output = kernel(x, weight, bias if with_bias else None)
    output.float().sum().backward()
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    torch.testing.assert_close(output.double(), expected, rtol=1e-2, atol=3e-2)
    assert x.grad is not None and weight.grad is not None and (bias.grad is not None) == with_bias
    torch.testing.assert_close(x.grad.double(), weight.double().sum(0).expand_as(x), rtol=1e-2, atol=3e-2)
    torch.testing.assert_close(weight.grad.double(), x.double().sum((0, 1)).expand_as(weight), rtol=1e-2, atol=3e-2)
