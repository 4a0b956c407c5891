"""Cross entropy of rows of logits in two passes: one read for the statistics, one read and one write for the gradient.

The functions are those of kernels/cross_entropy.py; the gradient takes the place of the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ctxlm_ds.kernels.cross_entropy import LOWEST, CrossEntropyKernel, RowStatistics
from ctxlm_ds.kernels.triton.launch import dense, launch, operator

LEAST = tl.constexpr(LOWEST)
NO_WORD = tl.constexpr(2**31 - 1)
GROUP = 8
"""Neighbours that one thread reads together: one exponential moves the sum to the largest of them."""
GROUPS, WARPS = 512, 8
BLOCK = 2048


@triton.jit
def add_block(largest, total, group, x, first):
    """Add logits x [groups, 8], of which the first is word `first`, to the statistics [groups] of the threads."""
    best = tl.maximum(largest, tl.max(x, axis=1))
    total = total * tl.exp(largest - best) + tl.sum(tl.exp(x - best[:, None]), axis=1)
    return best, total, tl.where(best > largest, first, group)


@triton.jit
def cross_entropy_statistics_kernel(
    logits, labels, largest_out, word_out, total_out, of_label_out, words, GROUPS: tl.constexpr, GROUP: tl.constexpr
):
    """Reduce one row: largest logit and its first word, sum of exponentials, and the label's logit."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * words
    lanes = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    largest = tl.full([GROUPS], LEAST, tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    group = tl.zeros([GROUPS], tl.int32)
    full = words // (GROUPS * GROUP) * (GROUPS * GROUP)
    for start in range(0, full, GROUPS * GROUP):
        x = tl.load(base + start + lanes).to(tl.float32)
        largest, total, group = add_block(largest, total, group, x, start + tl.arange(0, GROUPS) * GROUP)
    if full < words:
        x = tl.load(base + full + lanes, mask=full + lanes < words, other=-float("inf")).to(tl.float32)
        largest, total, group = add_block(largest, total, group, x, full + tl.arange(0, GROUPS) * GROUP)
    top = tl.max(largest, axis=0)
    at = tl.min(tl.where(largest == top, group, NO_WORD), axis=0) + tl.arange(0, GROUP)
    x = tl.load(base + at, mask=at < words, other=-float("inf")).to(tl.float32)
    word = tl.min(tl.where(x == top, at, NO_WORD), axis=0)
    label = tl.load(labels + row)
    inside = (label >= 0) & (label < words)
    tl.store(largest_out + row, top)
    tl.store(word_out + row, tl.where(word == NO_WORD, 0, word).to(tl.int64))
    tl.store(total_out + row, tl.sum(total * tl.exp(largest - top), axis=0))
    tl.store(of_label_out + row, tl.load(base + label, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def cross_entropy_gradient_kernel(logits, labels, log_total, factor, words, BLOCK: tl.constexpr):
    """Write softmax times a factor minus one-hot in the place of `BLOCK` logits of a row."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    word = start + tl.arange(0, BLOCK)
    at = logits + row * words + word
    label = tl.load(labels + row)
    less = tl.load(log_total + row)
    scale = 1.0
    if factor is not None:
        scale = tl.load(factor + row)
    if start + BLOCK <= words:
        probability = tl.exp(tl.load(at).to(tl.float32) - less) * scale
        tl.store(at, tl.where(word == label, probability - 1.0, probability).to(logits.dtype.element_ty))
    else:
        inside = word < words
        probability = tl.exp(tl.load(at, mask=inside, other=-float("inf")).to(tl.float32) - less) * scale
        value = tl.where(word == label, probability - 1.0, probability)
        tl.store(at, value.to(logits.dtype.element_ty), mask=inside)


@operator("cross_entropy_statistics(Tensor logits, Tensor labels) -> (Tensor, Tensor, Tensor, Tensor)")
def cross_entropy_statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of RowStatistics for logits [k, v] and labels [k]."""
    logits = dense(logits)
    rows, words = logits.shape
    largest, total, of_label = (logits.new_empty(rows, dtype=torch.float32) for _ in range(3))
    found = largest, torch.empty_like(labels), total, of_label
    settings = {"GROUPS": GROUPS, "GROUP": GROUP, "num_warps": WARPS}
    launch(cross_entropy_statistics_kernel, (rows,), logits, dense(labels), *found, words, **settings)
    return found


@operator("cross_entropy_gradient_(Tensor(a!) logits, Tensor labels, Tensor log_total, Tensor? factor) -> ()")
def cross_entropy_gradient(logits: Tensor, labels: Tensor, log_total: Tensor, factor: Tensor | None) -> None:
    """Write the gradient in the place of contiguous logits [k, v]."""
    rows, words = logits.shape
    grid = (rows, triton.cdiv(words, BLOCK))
    launch(cross_entropy_gradient_kernel, grid, logits, dense(labels), log_total, factor, words, BLOCK=BLOCK)


def row_statistics(logits: Tensor, labels: Tensor) -> RowStatistics:
    """Return what kernels/cross_entropy.py's row_statistics does."""
    return RowStatistics(*cross_entropy_statistics(logits, labels))


def row_gradient(logits: Tensor, labels: Tensor, log_total: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return what kernels/cross_entropy.py's row_gradient does, in the memory of the logits."""
    logits = dense(logits)
    cross_entropy_gradient(logits, labels, log_total, factor)
    return logits


KERNEL = CrossEntropyKernel(row_statistics, row_gradient)
