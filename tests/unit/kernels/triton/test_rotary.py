"""Triton's rotation against float64 and the plain operations, and what may read the memory that it writes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ctxlm_ds.kernels.rotary import Angles, RotaryKernel, torch_rotary
from tests.unit.kernels.triton.interpreter import in_interpreter

pytestmark = pytest.mark.long

SHAPES = [((4, 2, 2), 64, 64), ((3, 1, 1), 20, 20), ((2, 2, 2), 6, 6), ((9, 3, 3), 16, 10)]
"""Heads of queries, keys and values, size of a head, elements that rotate."""
PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1], [39, 12, 0, 0, 1, 2, 0]])


def angles(rotating: int, rows: torch.Tensor = PACKED) -> Angles:
    turns = torch.arange(40.0)[:, None] / 10 ** torch.linspace(0, 3, rotating // 2)
    return Angles(torch.cat([turns.cos(), turns.sin()], dim=-1), rows)


def packed(sizes: tuple[int, ...], size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, 7, sum(sizes), size, generator=torch.Generator().manual_seed(0)).to(dtype)


def with_gradient(kernel: RotaryKernel, heads: torch.Tensor, sizes: tuple[int, int, int], turn: Angles) -> list:
    """Return queries, keys, values, and the gradient of a sum of them with different weights."""
    leaf = heads.clone().requires_grad_()
    parts = kernel(leaf * 1.0, sizes, turn)
    upstream = [torch.linspace(-1, 1, x.numel()).to(torch.bfloat16).view(x.shape).to(x.dtype) for x in parts]
    (gradient,) = torch.autograd.grad(parts, leaf, upstream)
    return [*(x.detach() for x in parts), gradient]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("sizes", "size", "rotating"), SHAPES)
@in_interpreter
def test_values_and_gradients_are_those_of_float64(
    sizes: tuple[int, int, int], size: int, rotating: int, dtype: torch.dtype
) -> None:
    from ctxlm_ds.kernels.triton.rotary import triton_rotary

    heads, turn = packed(sizes, size, dtype), angles(rotating)
    exact = with_gradient(torch_rotary, heads.double(), sizes, Angles(turn.table.double(), turn.rows))
    found = with_gradient(triton_rotary, heads, sizes, turn)
    plain = with_gradient(torch_rotary, heads, sizes, turn)
    for one, other, wanted in zip(found, plain, exact, strict=True):
        errors = [((y.double() - wanted).abs().max() / wanted.abs().max()).item() for y in (one, other)]
        assert one.dtype == dtype and one.shape == wanted.shape
        assert errors[0] <= (2e-6 if dtype == torch.float32 else errors[1])
    for name, one, other in zip("qkv", found, plain, strict=False):  # not the gradient
        assert torch.equal(one, other), name


@in_interpreter
def test_the_rotation_takes_the_memory_of_a_projection_and_leaves_its_gradients_right() -> None:
    from ctxlm_ds.kernels.triton.rotary import triton_rotary

    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 24, generator=draw) for n in (14, 96))
    bias, sizes, places = torch.randn(96, generator=draw), (4, 2, 2), []

    def loss(kernel: RotaryKernel, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [y.to(dtype).clone().requires_grad_() for y in (x, weight, bias)]
        heads = F.linear(*leaves).view(2, 7, 8, 12)
        turn = angles(12)
        query, key, value = kernel(heads, sizes, Angles(turn.table.to(dtype), turn.rows))
        places[:] = [heads.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for y in (query, key, value)]
        query, key, value = (y.transpose(1, 2) for y in (query, key, value))
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        total = context.sin().sum()
        return [total.detach(), *torch.autograd.grad(total, leaves)]

    exact = loss(torch_rotary, torch.float64)
    assert places == [False, False, True]
    plain, found = (loss(kernel, torch.float32) for kernel in (torch_rotary, triton_rotary))
    assert places == [True, True, True]
    for one, other, wanted in zip(found, plain, exact, strict=True):
        errors = [((y.double() - wanted).abs().max() / wanted.abs().max()).item() for y in (one, other)]
        assert errors[0] <= max(2e-6, 1.5 * errors[1])


@in_interpreter
def test_a_function_that_kept_the_heads_gets_an_error_instead_of_other_numbers() -> None:
    from ctxlm_ds.kernels.triton.rotary import triton_rotary

    leaf = packed((4, 2, 2), 12, torch.float32).requires_grad_()
    heads = leaf.exp()  # keeps its result
    query, *_ = triton_rotary(heads, (4, 2, 2), angles(12))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        query.sum().backward()


@in_interpreter
def test_gradients_of_others_stay_as_they_are() -> None:
    """The backward pass writes its own memory: a gradient may be expanded, or somebody else's."""
    from ctxlm_ds.kernels.triton.rotary import triton_rotary

    leaf = packed((4, 2, 2), 12, torch.float32).requires_grad_()
    results = []
    for kernel in (triton_rotary, torch_rotary):
        parts = kernel(leaf * 1.0, (4, 2, 2), angles(12))
        given = [torch.ones(()).expand(x.shape) for x in parts[:2]]
        results.append(torch.autograd.grad(parts[:2], leaf, given)[0])
        assert all((x == 1).all() for x in given)
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


@in_interpreter
def test_rows_of_another_layout_are_read_by_their_places() -> None:
    from ctxlm_ds.kernels.triton.rotary import triton_rotary

    heads, turn = packed((4, 2, 2), 12, torch.float32), angles(12, PACKED.t().contiguous().t())
    turned = heads.transpose(0, 1).contiguous().transpose(0, 1)
    for one, other in zip(triton_rotary(turned, (4, 2, 2), turn), torch_rotary(heads, (4, 2, 2), turn), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_compiled_layer_fuses_the_plain_operations() -> None:
    from ctxlm_ds.kernels.triton.rotary import triton_rotary

    heads, turn = packed((4, 2, 2), 12, torch.float32), angles(12)
    compiled = torch.compile(lambda x: triton_rotary(x, (4, 2, 2), turn), backend="eager", fullgraph=True)
    before = heads.clone()
    for one, other in zip(compiled(heads), torch_rotary(heads, (4, 2, 2), turn), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(heads, before)
