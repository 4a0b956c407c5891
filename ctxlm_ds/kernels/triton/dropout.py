"""Dropout by key in one pass: 4 bytes an element of 16 bits, forward and backward, and no mask kept.

The hash has equal bits for each element's place as that of kernels/dropout.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ctxlm_ds.kernels import dropout
from ctxlm_ds.kernels.dropout import threshold_and_factor
from ctxlm_ds.kernels.triton.launch import dense, differentiable, launch, operator

GAMMA = tl.constexpr(dropout.GAMMA)
MIX_1 = tl.constexpr(dropout.MIX_1)
MIX_2 = tl.constexpr(dropout.MIX_2)
BLOCK = 2048


@triton.jit
def hash_words(words, key):
    """Return splitmix64 of uint64 words and a key."""
    return mix((words + 1) * GAMMA + key)


@triton.jit
def mix(z):
    """Return the hash of a word's state, (word + 1) GAMMA + key."""
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def keeps(places, key, threshold):
    """Return whether the elements at int64 places are kept.

    Each element hashes its word of four lanes. The compiler merges the four equal hashes of neighbours in one thread.
    """
    bits = hash_words((places // 4).to(tl.uint64), key.to(tl.uint64)) >> ((places % 4) * 16).to(tl.uint64)
    # A lane counts as a signed number: its highest bit is turned.
    return ((bits & 0xFFFF).to(tl.int32) ^ 0x8000) >= threshold


@triton.jit(do_not_specialize_on_alignment=["key"])
def dropout_kernel(x, key, out, size, first, threshold, factor, BLOCK: tl.constexpr):
    """Keep or zero `BLOCK` elements; a complete block takes no mask, so that its accesses have 16 bytes."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    at = begin + tl.arange(0, BLOCK)
    keep = keeps(at + first, tl.load(key), threshold)
    if begin + BLOCK <= size:
        value = tl.load(x + at).to(tl.float32)
        tl.store(out + at, tl.where(keep, value * factor, 0.0).to(out.dtype.element_ty))
    else:
        value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(out + at, tl.where(keep, value * factor, 0.0).to(out.dtype.element_ty), mask=at < size)


@operator("keyed_dropout(Tensor x, float p, Tensor key, SymInt first=0) -> Tensor")
def keyed_dropout(x: Tensor, p: float, key: Tensor, first: int = 0) -> Tensor:
    """Drop elements of x (kernels/dropout.py, keyed_dropout)."""
    x, out = dense(x), torch.empty_like(x, memory_format=torch.contiguous_format)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    launch(dropout_kernel, grid, x, key, out, x.numel(), first, *threshold_and_factor(p), BLOCK=BLOCK)
    return out


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.p, key, ctx.first = inputs
    ctx.save_for_backward(key)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return keyed_dropout(gradient, ctx.p, *ctx.saved_tensors, ctx.first), None, None, None


differentiable(keyed_dropout, _keep, _backward)
