"""Dropout by key, residual sum and norm in one pass each way: 8 bytes an element of 16 bits, and no mask kept.

The operation is that of kernels/norm.py. The gradients of weight and bias are sums over rows: a number of programs
that depends on the shape alone adds rows in a fixed order, then torch adds the programs. They are therefore
deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ctxlm_ds.kernels.dropout import threshold_and_factor
from ctxlm_ds.kernels.norm import Drop
from ctxlm_ds.kernels.triton.dropout import keeps
from ctxlm_ds.kernels.triton.launch import dense, differentiable, launch, operator

PROGRAMS = 512
"""Programs of the gradient at most: each writes fp32 sums of a row's size, so that more of them cost memory traffic."""


@triton.jit(do_not_specialize_on_alignment=["key"])
def add_norm_kernel(
    x, residual, weight, bias, key, z_out, y_out, means, scales, width, first, threshold, factor, eps,
    LAYER: tl.constexpr, DROP_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write sum and norm of one row; the statistics are those of the rounded sum, which the gradient reads."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if key is not None:
        keep = keeps(at + first, tl.load(key), threshold)
        if not DROP_LAST:
            value = tl.where(keep, value * factor, 0.0)
    value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(z_out.dtype.element_ty)
    tl.store(z_out + at, rounded, mask=inside)
    centred = rounded.to(tl.float32)
    if LAYER:
        mean = tl.sum(centred, axis=0) / width
        tl.store(means + row, mean)
        centred = tl.where(inside, centred - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    tl.store(scales + row, scale)
    y = centred * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if DROP_LAST and key is not None:
        y = tl.where(keep, y * factor, 0.0)
    tl.store(y_out + at, y.to(y_out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["key"])
def add_norm_gradient_kernel(
    of_y, of_z, z, weight, key, means, scales, residual_out, x_out, sums_out, rows, width, first, threshold, factor,
    LAYER: tl.constexpr, DROP_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of residual and x for each `num_programs`-th row, and the sums of weight and bias."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    of_weight = tl.zeros([BLOCK], tl.float32)
    of_bias = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        at = row * width + column
        arriving = tl.load(of_y + at, mask=inside, other=0.0).to(tl.float32)
        normed = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
        if DROP_LAST and key is not None:
            arriving = tl.where(keeps(at + first, tl.load(key), threshold), arriving * factor, 0.0)
        scale = tl.load(scales + row)
        # Loaded for each row, from a cache, so that it need not stay in registers.
        scaled = arriving * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        shift = 0.0
        if LAYER:
            normed -= tl.load(means + row)
            of_bias += arriving
            shift = tl.sum(scaled, axis=0) / width
        normed *= scale
        of_weight += arriving * normed
        value = (scaled - shift - normed * (tl.sum(scaled * normed, axis=0) / width)) * scale
        if of_z is not None:
            value += tl.load(of_z + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_out + at, value.to(residual_out.dtype.element_ty), mask=inside)
        if x_out is not None:
            value = tl.where(keeps(at + first, tl.load(key), threshold), value * factor, 0.0)
            tl.store(x_out + at, value.to(x_out.dtype.element_ty), mask=inside)
    sums = sums_out + tl.program_id(0) * (1 + LAYER) * width + column
    tl.store(sums, of_weight, mask=inside)
    if LAYER:
        tl.store(sums + width, of_bias, mask=inside)


def _tile(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


@operator(
    "add_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, Tensor? key, float eps, float p, SymInt first, "
    "bool layer, bool drop_last) -> (Tensor, Tensor, Tensor, Tensor)"
)
def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, key: Tensor | None, eps: float, p: float,
    first: int, layer: bool, drop_last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return sum and norm of x and residual [..., h], and the fp32 mean (LayerNorm only) and factor of each row."""
    x, width = dense(x), x.shape[-1]
    rows = x.numel() // width
    z, y = (torch.empty_like(x) for _ in range(2))
    mean, scale = (x.new_empty(n, dtype=torch.float32) for n in (rows if layer else 0, rows))
    tensors = x, dense(residual), weight, bias, key, z, y, mean, scale
    numbers = width, first, *threshold_and_factor(p), eps
    launch(add_norm_kernel, (rows,), *tensors, *numbers, LAYER=layer, DROP_LAST=drop_last, **_tile(width))
    return z, y, mean, scale


@operator(
    "add_norm_gradient(Tensor of_y, Tensor? of_z, Tensor z, Tensor weight, Tensor? key, Tensor mean, Tensor scale, "
    "float p, SymInt first, bool layer, bool drop_last) -> (Tensor, Tensor, Tensor)"
)
def add_norm_gradient(
    of_y: Tensor, of_z: Tensor | None, z: Tensor, weight: Tensor, key: Tensor | None, mean: Tensor, scale: Tensor,
    p: float, first: int, layer: bool, drop_last: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of residual and of x (nothing if it is the same), and fp32 sums [programs, 1 or 2, h]."""
    rows, width = scale.shape[0], z.shape[-1]
    programs = min(rows, PROGRAMS)
    of_residual = torch.empty_like(z)
    of_x = None if key is None or drop_last else torch.empty_like(z)
    sums = z.new_empty((programs, 1 + layer, width), dtype=torch.float32)
    tensors = dense(of_y), None if of_z is None else dense(of_z), z, weight, key, mean, scale, of_residual, of_x, sums
    numbers = rows, width, first, *threshold_and_factor(p)
    launch(add_norm_gradient_kernel, (programs,), *tensors, *numbers, LAYER=layer, DROP_LAST=drop_last, **_tile(width))
    return of_residual, z.new_empty(0) if of_x is None else of_x, sums


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, key, _, *ctx.settings = inputs
    z, _, mean, scale = output
    ctx.has_bias = bias is not None
    ctx.save_for_backward(z, weight, key, mean, scale)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, of_z: Tensor | None, of_y: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    z, weight, *others = ctx.saved_tensors  # a recomputed layer gives them once
    of_y = torch.zeros_like(z) if of_y is None else of_y
    of_residual, of_x, sums = add_norm_gradient(of_y, of_z, z, weight, *others, *ctx.settings)
    of_weight, *of_bias = sums.sum(0).to(weight.dtype).unbind(0)
    of_x = of_x if of_x.numel() else of_residual
    return of_x, of_residual, of_weight, of_bias[0] if ctx.has_bias else None, *[None] * 6


differentiable(add_norm, _keep, _backward)


def triton_add_norm(
    x: Tensor, residual: Tensor, parameters: tuple[Any, ...], eps: float,
    drop: Drop | None = None, drop_last: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute an AddNormKernel: LayerNorm if the parameters are weight and bias (or None), RMSNorm if the weight."""
    weight, *bias = parameters
    p, key, first = (0.0, None, 0) if drop is None else drop
    settings = eps, p, first, bool(bias), drop_last
    return add_norm(x, residual, weight, bias[0] if bias else None, key, *settings)[:2]
