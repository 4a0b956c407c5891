"""The interpreter's two faults with bf16 are corrected: rounding, and products of matrices."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.unit.kernels.triton.interpreter import in_interpreter

pytestmark = pytest.mark.long
SIZE = 16


@triton.jit
def product_kernel(a, b, out, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + places, tl.dot(tl.load(a + places), tl.load(b + places)))


@triton.jit
def round_kernel(x, out, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(out + places, tl.load(x + places).to(tl.bfloat16))


@in_interpreter
def test_fp32_is_rounded_to_the_nearest_bf16() -> None:
    x = torch.linspace(-3, 3, SIZE) ** 3
    found = torch.empty(SIZE, dtype=torch.bfloat16)
    round_kernel[(1,)](x, found, SIZE=SIZE)
    assert torch.equal(found, x.bfloat16())


@in_interpreter
def test_bf16_matrices_are_multiplied_as_numbers() -> None:
    a, b = torch.randn(2, SIZE, SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = torch.empty(SIZE, SIZE)
    product_kernel[(1,)](a, b, found, SIZE=SIZE)
    torch.testing.assert_close(found, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
