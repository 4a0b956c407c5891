"""Gated activations in one pass each way: 6 bytes an inner element of 16 bits forward, 10 backward.

Only the input is kept for the backward pass. Plain activations stay torch's, which read and write once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ctxlm_ds.kernels.bias_gelu import GatedKernel
from ctxlm_ds.kernels.triton.launch import dense, differentiable, launch, operator

ROWS, COLUMNS = 4, 256
"""Of a program's tile; a thread of 128 takes 8 neighbours."""
ROOT_HALF = tl.constexpr(math.sqrt(0.5))
NORMAL = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))
TWICE = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
CUBE = tl.constexpr(0.044715)


@triton.jit
def activate(x, NAME: tl.constexpr):
    """Return an activation of REFERENCE_ACTIVATIONS (kernels/bias_gelu.py) and its derivative at fp32 x."""
    if NAME == "relu":
        return tl.where(x <= 0.0, 0.0, x), tl.where(x > 0.0, 1.0, 0.0)
    elif NAME == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * ROOT_HALF))
        slope = tl.exp(-0.5 * x * x) * NORMAL
    elif NAME == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the logistic function of twice z.
        bend = x * x * CUBE
        share = 1.0 / (1.0 + tl.exp(-x * (1.0 + bend) * TWICE))
        slope = share * (1.0 - share) * (1.0 + 3.0 * bend) * TWICE
    else:
        tl.static_assert(NAME == "silu")
        share = 1.0 / (1.0 + tl.exp(-x))
        slope = share * (1.0 - share)
    return x * share, share + x * slope


@triton.jit
def tile_of(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return this program's places in [rows, width] and in the gates of [rows, 2 width], and which exist."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    first = row.to(tl.int64) * width
    return first + column, 2 * first + column, (row < rows) & (column < width)


@triton.jit
def gated_kernel(x, out, rows, width, NAME: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write activation(gate) * value of one tile."""
    at, gate_at, inside = tile_of(rows, width, ROWS, COLUMNS)
    gate = tl.load(x + gate_at, mask=inside).to(tl.float32)
    value = tl.load(x + gate_at + width, mask=inside).to(tl.float32)
    activated, _ = activate(gate, NAME)
    tl.store(out + at, (activated * value).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_gradient_kernel(gradient, x, out, rows, width, NAME: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the gradients of the gates and values of one tile."""
    at, gate_at, inside = tile_of(rows, width, ROWS, COLUMNS)
    upstream = tl.load(gradient + at, mask=inside).to(tl.float32)
    gate = tl.load(x + gate_at, mask=inside).to(tl.float32)
    value = tl.load(x + gate_at + width, mask=inside).to(tl.float32)
    activated, derivative = activate(gate, NAME)
    tl.store(out + gate_at, (upstream * value * derivative).to(out.dtype.element_ty), mask=inside)
    tl.store(out + gate_at + width, (upstream * activated).to(out.dtype.element_ty), mask=inside)


def _launch(kernel: Any, tensors: tuple[Tensor, ...], width: int, activation: str) -> None:
    """Launch over the tiles of [rows, width]; the last of the tensors is the result."""
    rows = tensors[0].numel() // tensors[0].shape[-1]
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(width, COLUMNS))
    launch(kernel, grid, *tensors, rows, width, NAME=activation, ROWS=ROWS, COLUMNS=COLUMNS)


@operator("gated_activation(Tensor x, str activation) -> Tensor")
def gated_activation(x: Tensor, activation: str) -> Tensor:
    """Map x [..., 2 i] to activation(first half) * second half, [..., i]."""
    x, width = dense(x), x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    _launch(gated_kernel, (x, out), width, activation)
    return out


@operator("gated_activation_gradient(Tensor gradient, Tensor x, str activation) -> Tensor")
def gated_activation_gradient(gradient: Tensor, x: Tensor, activation: str) -> Tensor:
    """Return the gradient of x [..., 2 i] for the gradient [..., i] of the result."""
    x = dense(x)
    out = torch.empty_like(x)
    _launch(gated_gradient_kernel, (dense(gradient), x, out), x.shape[-1] // 2, activation)
    return out


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.activation = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gated_activation_gradient(gradient, *ctx.saved_tensors, ctx.activation), None


differentiable(gated_activation, _keep, _backward)
triton_gated: GatedKernel = gated_activation
