"""Cross entropy of the scores of a vocabulary, some rows at a time: product, loss and gradient in one pass.

Neither logits nor their gradient of all rows are held, which is up to 16 bytes a logit (Megatron's, Liger's and torch's
linear_cross_entropy do the same; torch's rounds the sum of the losses to 16 bits and counts no right predictions).

Shape letters: k rows, h width, v words of this rank, n tensor-parallel ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.kernels.cross_entropy import CrossEntropyKernel
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import first_over_ranks
from ctxlm_ds.parallel.mappings import all_gather, all_reduce, reduce_scatter

CPU_CHUNK, CHUNK = 1 << 24, 1 << 26
"""Most logits that are held together."""
TILE = 128
"""Rows of a chunk are a multiple of this."""


@dataclass(frozen=True)
class LinearCrossEntropy:
    """The loss of a decoder's rows, with the precision of its products."""

    kernel: CrossEntropyKernel
    parallel: ParallelContext
    num_words: int
    """Rows of this rank's table that are words."""
    in_float32: bool
    """Compute as kernels/linear.py's float32."""
    split_tokens: bool
    """Hidden states are those of this rank's tokens only."""
    z_loss: float = 0.0
    """Weight of the squared logarithm of the sum of exponentials."""

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> tuple[Tensor, ...]:
        """Sum the cross entropy of hidden [..., h] @ weight [v, h].T + bias [v] with k labels in any shape.

        Labels are ids of the complete vocabulary, or IGNORE_LABEL; under sequence parallelism hidden is [k / n, h].

        Returns:
            fp32 sum of the losses, and the number of labels that have the largest logit (of equal ones the first
            counts). Every rank has both. With a z_loss also the sum of the squares without their weight: the gradient
            of the first sum then is that of both, so that one pass makes it, and the sum of squares has none.
        """
        found: tuple[Tensor, ...] = _Losses.apply(
            hidden.flatten(0, -2).contiguous(), weight, bias, labels.flatten().long(), self, torch.is_grad_enabled()
        )
        return found if self.z_loss else found[:2]


def chunk_rows(num_rows: int, num_words: int, device: torch.device) -> int:
    """Return the rows of each chunk, of which the last may have fewer; on `meta` all are one."""
    limit = num_rows * num_words if device.type == "meta" else CPU_CHUNK if device.type == "cpu" else CHUNK
    num_chunks = -(-num_rows * num_words // limit)
    return -(-num_rows // (max(num_chunks, 1) * TILE)) * TILE


class _Losses(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: LinearCrossEntropy,
        wants_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        parallel = call.parallel
        ctx.dtype = hidden.dtype
        x = all_gather(hidden, parallel)[0] if call.split_tokens else hidden
        if call.in_float32:
            x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
        sums = _Pass(call, weight, bias, wants_gradient)
        loss, hits, squares = sums.over(x, labels)
        if wants_gradient:
            of_input = sums.of_input.to(hidden.dtype)
            of_input = reduce_scatter(of_input, parallel)[0] if call.split_tokens else all_reduce(of_input, parallel)
            ctx.save_for_backward(of_input, sums.of_weight, sums.of_bias)
        ctx.mark_non_differentiable(hits, squares)
        return loss, hits, squares

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_hits: Tensor, of_squares: Tensor) -> Any:
        # Gradients of the weights are fp32 until the factor, without which sums may be too large for fp16.
        scaled = [None if x is None else (x * gradient).to(ctx.dtype) for x in ctx.saved_tensors]
        return *scaled, None, None, None


class _Pass:
    """One pass over all rows, which adds up the gradients of a loss of 1."""

    def __init__(self, call: LinearCrossEntropy, weight: Tensor, bias: Tensor | None, wants_gradient: bool) -> None:
        self.call, self.weight, self.bias, self.wants_gradient = call, weight, bias, wants_gradient
        self.first_row = weight.shape[0] * call.parallel.rank
        self.of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_gradient else None
        self.of_bias = None
        if bias is not None and wants_gradient:
            self.of_bias = torch.zeros_like(bias, dtype=torch.float32)

    def over(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return sum of the losses, hits and sum of the squares of x [k, h]."""
        self.of_input = torch.empty_like(x) if self.wants_gradient else x  # only written for a gradient
        size = chunk_rows(len(x), len(self.weight), x.device)
        counted = labels != IGNORE_LABEL
        own = (labels - self.first_row).where(counted, -1)
        chunks = zip(x.split(size), own.split(size), counted.split(size), self.of_input.split(size), strict=True)
        losses, squares, largest, words = zip(*(self._chunk(*chunk) for chunk in chunks), strict=True)
        word = first_over_ranks(torch.cat(largest), torch.cat(words), len(self.weight), self.call.parallel)
        hits = ((word == labels) & counted).sum(dtype=torch.float32)
        return torch.stack(losses).sum(), hits, torch.stack(squares).sum()

    def _chunk(self, x: Tensor, labels: Tensor, counted: Tensor, of_input: Tensor) -> tuple[Tensor, ...]:
        """Return loss and squares of some rows, their largest logits and these words; add up the gradients."""
        parallel, kernel, z_loss = self.call.parallel, self.call.kernel, self.call.z_loss
        logits = F.linear(x, self.weight, self.bias)
        logits[:, self.call.num_words :] = -math.inf
        largest, word, total, of_label = kernel.statistics(logits, labels)
        overall = largest
        if parallel.size > 1:
            overall = all_reduce(largest.clone(), parallel, dist.ReduceOp.MAX)
            total, of_label = all_reduce(torch.stack([total * (largest - overall).exp(), of_label]), parallel)
        log_total = overall + total.log()
        if self.of_weight is not None:
            factor = (1.0 + 2.0 * z_loss * log_total,) if z_loss else ()
            gradient = kernel.gradient(logits, labels, log_total.where(counted, math.inf), *factor)
            torch.mm(gradient, self.weight, out=of_input)
            _add_product(self.of_weight, gradient.t(), x)
            if self.of_bias is not None:
                self.of_bias += gradient.sum(dim=0, dtype=torch.float32)
        squares = log_total.square().where(counted, 0.0).sum()
        return (log_total - of_label).where(counted, 0.0).sum(), squares, largest, word


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to the fp32 total; on a GPU 16-bit products are not rounded before."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += torch.mm(a, b, out_dtype=total.dtype) if a.is_cuda else a @ b
