"""Triton's dropout against the plain hash: equal bits."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.kernels import dropout
from tests.unit.kernels.triton.interpreter import in_interpreter

pytestmark = pytest.mark.long

KEY = 0x5DEECE66D1234567


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "first"), [((2, 2048), 0), ((3, 1367), 4096), ((5,), 7)])
@in_interpreter
def test_elements_and_gradients_are_those_of_the_plain_hash(
    dtype: torch.dtype, shape: tuple[int, ...], first: int
) -> None:
    from ctxlm_ds.kernels.triton.dropout import keyed_dropout as triton_dropout

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    for key in (torch.tensor(KEY), torch.tensor(-KEY)):
        found, expected = (kernel(x, 0.1, key, first) for kernel in (triton_dropout, dropout.keyed_dropout))
        assert found.dtype == dtype and torch.equal(found, expected)
        factors = torch.arange(x.numel(), dtype=dtype).view(shape)
        gradients = [torch.autograd.grad(y, x, factors)[0] for y in (found, expected)]
        assert torch.equal(*gradients)


@in_interpreter
def test_a_transposed_tensor_drops_by_its_places() -> None:
    from ctxlm_ds.kernels.triton.dropout import keyed_dropout as triton_dropout

    x = torch.randn(6, 10).t()
    assert torch.equal(triton_dropout(x, 0.5, torch.tensor(KEY)), dropout.keyed_dropout(x, 0.5, torch.tensor(KEY)))
