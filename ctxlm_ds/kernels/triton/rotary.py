"""Rotary positions in place: 4 bytes an element of 16 bits of queries and keys each way, and none for values.

The function is torch_rotary of kernels/rotary.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ctxlm_ds.kernels.rotary import Angles, torch_rotary
from ctxlm_ds.kernels.triton.launch import dense, launch, operator

PAIRS = 1024
"""Of a program's tile of tokens, heads and pairs; a thread of 128 takes 8 neighbours."""
HEADS = 8


@triton.jit
def rotary_kernel(
    heads, table, rows, tokens, turned, stride, sign,
    SIZE: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs of `turned` heads of some tokens by sign times the angles."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    head = tl.arange(0, HEADS)[None, :, None]
    pair = tl.arange(0, LANES)[None, None, :]
    inside = (token < tokens) & (pair < HALF)
    angle = table + tl.load(rows + token, mask=token < tokens, other=0) * (2 * HALF) + pair
    cos = tl.load(angle, mask=inside, other=0.0)
    sin = tl.load(angle + HALF, mask=inside, other=0.0) * sign
    for begin in range(0, turned, HEADS):
        at = heads + token.to(tl.int64) * stride + (begin + head) * SIZE + pair
        mask = inside & (begin + head < turned)
        first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, (first * cos - second * sin).to(heads.dtype.element_ty), mask=mask)
        tl.store(at + HALF, (second * cos + first * sin).to(heads.dtype.element_ty), mask=mask)


@operator("rotate_(Tensor(a!) heads, Tensor table, Tensor rows, SymInt turned, float sign) -> ()")
def rotate(heads: Tensor, table: Tensor, rows: Tensor, turned: int, sign: float) -> None:
    """Rotate the first `turned` of contiguous heads [b, s, n, d], where they are, by sign times the angles."""
    tokens, (number, size), half = rows.numel(), heads.shape[-2:], table.shape[-1] // 2
    lanes = triton.next_power_of_2(half)
    block = max(1, PAIRS // (lanes * HEADS))
    shape = {"SIZE": size, "HALF": half, "LANES": lanes, "TOKENS": block, "HEADS": HEADS}
    arguments = heads, table, dense(rows), tokens, turned, number * size, sign
    launch(rotary_kernel, (triton.cdiv(tokens, block),), *arguments, **shape)


class _InPlace(torch.autograd.Function):
    """Rotate in the memory of the projection's result, which no backward pass reads; back in that of the gradients."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, sizes: tuple[int, int, int], table: Tensor, rows: Tensor) -> Any:
        ctx.turned = sizes[0] + sizes[1]
        ctx.save_for_backward(table, rows)
        rotate(heads, table, rows, ctx.turned, 1.0)
        # A function that kept the heads for its backward pass gets an error instead of other numbers.
        torch.autograd.graph.increment_version(heads)
        return heads.split(sizes, dim=2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        packed = dense(torch.cat(gradients, dim=2))
        rotate(packed, *ctx.saved_tensors, ctx.turned, -1.0)
        return packed, None, None, None


def triton_rotary(heads: Tensor, sizes: tuple[int, int, int], angles: Angles) -> tuple[Tensor, ...]:
    """Rotate queries and keys in place; torch.compile makes one kernel of the plain operations by itself."""
    if torch.compiler.is_compiling() or angles.rows is None:
        return torch_rotary(heads, sizes, angles)
    return _InPlace.apply(dense(heads), sizes, *angles)
