"""Losses over the vocabulary of one rank or of all tensor-parallel ranks, and between a model and its teacher.

LinearCrossEntropy compares some rows at a time: product, loss and gradient in one pass. Neither logits nor their
gradient of all rows are held, which is up to 16 bytes a logit (Megatron's, Liger's and torch's linear_cross_entropy do
the same; torch's rounds the sum of the losses to 16 bits and counts no right predictions).

Shape letters: v vocabulary, n tensor-parallel ranks, k labels, positions or rows, t tokens, h width; of
LinearCrossEntropy v words of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.kernels.cross_entropy import CrossEntropyKernel
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.mappings import (
    all_gather,
    all_reduce,
    own_positions,
    own_tokens,
    reduce_from_ranks,
    reduce_scatter,
)


class Sums(NamedTuple):
    """fp32 sums of one loss term over a micro-batch, equal on every tensor-parallel rank."""

    loss: Tensor
    correct: Tensor | None
    """Right predictions; None if the term does not predict classes."""
    count: Tensor
    """Divisor of the loss (LossTerm.count)."""


def vocabulary_sums(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Sum the cross entropy of logits [..., v / n] of this rank's words with labels [...], over all words."""
    if parallel.size == 1:
        return classification_sums(outputs, labels, parallel)
    (logits,), (label,) = outputs, labels
    losses, hits = label_losses(logits, label, parallel)
    return Sums(losses.sum(), hits.sum(), (label != IGNORE_LABEL).sum(dtype=torch.float32))


def given_sums(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Return sums that a decoder made of its scores and the labels [...] itself (VocabParallelEmbedding)."""
    (loss_sum, *correct), (label,) = outputs, labels
    return Sums(loss_sum, correct[0] if correct else None, (label != IGNORE_LABEL).sum(dtype=torch.float32))


def label_losses(logits: Tensor, labels: Tensor, parallel: ParallelContext) -> tuple[Tensor, Tensor]:
    """Compare logits [..., v / n] of this rank's words with labels [...].

    Returns:
        fp32 cross entropy over all words [k], 0 for IGNORE_LABEL, and 1 for each label [k] that has the largest logit.
    """
    flat_logits, flat_labels = logits.flatten(0, -2), labels.flatten()
    counted = flat_labels != IGNORE_LABEL
    hits = ((first_largest(flat_logits.detach(), parallel) == flat_labels) & counted).float()
    if parallel.size == 1:
        losses = F.cross_entropy(flat_logits.float(), flat_labels, ignore_index=IGNORE_LABEL, reduction="none")
        return losses, hits
    from ctxlm_ds.parallel.megatron import vocab_parallel_cross_entropy

    # Three all-reduces of one fp32 number per label: the largest logit, the label's, the sum of exponentials.
    for _ in range(3):
        parallel.traffic.add("all_reduce", flat_labels.numel() * 4)
    # megatron-core copies 16-bit logits but overwrites fp32 ones, which another term or layer may read.
    own = flat_logits.clone() if flat_logits.dtype == torch.float32 else flat_logits
    losses = vocab_parallel_cross_entropy(own, flat_labels.where(counted, 0))
    return losses.where(counted, 0.0), hits


def classification_sums(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Sum the cross entropy of complete logits [..., v] with labels [...]."""
    (logits,), (label,) = outputs, labels
    flat_logits, flat_labels = logits.flatten(0, -2), label.flatten()
    loss_sum = F.cross_entropy(flat_logits.float(), flat_labels, ignore_index=IGNORE_LABEL, reduction="sum")
    correct = (flat_logits.detach().argmax(dim=-1) == flat_labels).sum(dtype=torch.float32)
    count = (flat_labels != IGNORE_LABEL).sum(dtype=torch.float32)
    return Sums(loss_sum, correct, count)


def binary_sums(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Sum the binary cross entropy of logits [...], which every rank has completely, with labels [...] 0 and 1."""
    (logits,), (label,) = outputs, labels
    counted = label != IGNORE_LABEL
    wanted = (label > 0).float()
    losses = F.binary_cross_entropy_with_logits(logits.float(), wanted, reduction="none")
    correct = ((logits.detach() > 0) == (label > 0)) & counted
    count = counted.sum(dtype=torch.float32)
    return Sums(losses.where(counted, 0.0).sum(), correct.sum(dtype=torch.float32), count)


def first_largest(logits: Tensor, parallel: ParallelContext) -> Tensor:
    """Return the word [k] with the largest of logits [k, v / n] over all ranks, the first of equal ones."""
    if parallel.size == 1:
        return logits.argmax(dim=-1)
    largest, word = logits.max(dim=-1)
    return first_over_ranks(largest, word, logits.shape[-1], parallel)


def first_over_ranks(largest: Tensor, word: Tensor, words_per_rank: int, parallel: ParallelContext) -> Tensor:
    """Return the word [k] with the largest number over all ranks, the first of equal ones.

    `largest` [k] is this rank's, `word` [k] the first of its `words_per_rank` that has it, from 0 on every rank.
    """
    largest, word = largest.float(), word + parallel.rank * words_per_rank
    if parallel.size == 1:
        return word
    overall = all_reduce(largest.clone(), parallel, dist.ReduceOp.MAX)
    beyond = parallel.size * words_per_rank
    return all_reduce(word.where(largest == overall, beyond), parallel, dist.ReduceOp.MIN)


def squared_totals(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Sum the squared logarithm of the sum of exponentials of logits [..., v / n] over all words, for each label [...].

    T5's z_loss (Raffel 2020's operative_config.gin; mesh_tensorflow, layers.py, softmax_cross_entropy_with_logits).
    """
    (logits,), (label,) = outputs, labels
    counted = label.flatten() != IGNORE_LABEL
    log_totals = _LogTotal.apply(logits.flatten(0, -2), parallel)
    return Sums(log_totals.square().where(counted, 0.0).sum(), None, counted.sum(dtype=torch.float32))


class _LogTotal(Function):
    """Logarithm [k] of the sum of exponentials over all ranks; keeps the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, parallel: ParallelContext) -> Tensor:
        largest = all_reduce(logits.amax(-1, keepdim=True).float(), parallel, dist.ReduceOp.MAX)
        total = (logits.float() - largest).exp_().sum(-1, keepdim=True)
        log_total = largest + all_reduce(total, parallel).log()
        ctx.save_for_backward(logits, log_total)
        return log_total.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, log_total = ctx.saved_tensors
        return (logits.float() - log_total).exp_().mul_(gradient[:, None]).to(logits.dtype), None


def soft_target_sums(
    outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext, temperature: float = 1.0
) -> Sums:
    """Sum temperature² · KL(teacher ‖ student) of softmax(logits / temperature) (Hinton 2015; Sanh 2019, section 2).

    The outputs are logits [..., v / n] of this rank's words, of student and teacher; labels [...] are IGNORE_LABEL at
    positions that do not count. A right prediction is a position at which both have the same largest logit.
    """
    student, teacher = (logits.flatten(0, -2) for logits in outputs)
    counted = labels[0].flatten() != IGNORE_LABEL
    divergences = _Divergence.apply(student, teacher.detach(), counted, temperature, parallel)
    largest = [first_largest(logits.detach(), parallel) for logits in (student, teacher)]
    hits = (largest[0] == largest[1]) & counted
    return Sums(divergences.sum(), hits.sum(dtype=torch.float32), counted.sum(dtype=torch.float32))


class _Divergence(Function):
    """temperature² · KL [k] of counted positions; keeps only its gradient, temperature · (student - teacher)."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, counted: Tensor, temperature: float, parallel: ParallelContext
    ) -> Tensor:
        moved, log_total = _shifted(student, temperature, parallel)
        moved_teacher, log_total_teacher = _shifted(teacher, temperature, parallel)
        probabilities = (moved_teacher - log_total_teacher).exp_()
        # Padding rows of the table have logits of -inf in both models.
        difference = moved_teacher.sub_(moved).masked_fill_(probabilities == 0.0, 0.0)
        divergences = all_reduce(difference.mul_(probabilities).sum(-1), parallel)
        divergences = divergences + (log_total - log_total_teacher).squeeze(-1)
        if ctx.needs_input_grad[0]:
            gradient = (moved - log_total).exp_().sub_(probabilities).mul_(temperature)
            ctx.save_for_backward(gradient.masked_fill_(~counted[:, None], 0.0).to(student.dtype))
        return temperature**2 * divergences.where(counted, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        return (kept * gradient[:, None]).to(kept.dtype), None, None, None, None


def _shifted(logits: Tensor, temperature: float, parallel: ParallelContext) -> tuple[Tensor, Tensor]:
    """Return logits / temperature [k, v / n] minus the largest of all ranks, and the log of their exponentials' sum."""
    moved = logits.float() / temperature
    largest = all_reduce(moved.amax(-1, keepdim=True), parallel, dist.ReduceOp.MAX)
    total = moved.sub_(largest).exp().sum(-1, keepdim=True)
    return moved, all_reduce(total, parallel).log()


def cosine_sums(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Sum 1 - cos of the angle between student's and teacher's hidden states at every token.

    The outputs are hidden states [..., h] of both, under sequence parallelism of this rank's tokens; labels are
    sequence_ids [b, s] of complete rows, 0 at padding.
    """
    student, teacher = (hidden.flatten(0, -2).float() for hidden in outputs)
    everywhere = own_positions(labels[0], parallel).flatten() > 0
    counted = own_tokens(everywhere, parallel) if parallel.splits_tokens else everywhere
    same_direction = torch.ones_like(student[:, 0])
    loss = F.cosine_embedding_loss(student, teacher, same_direction, reduction="none").where(counted, 0.0).sum()
    if parallel.splits_tokens:
        loss = reduce_from_ranks(loss, parallel)
    return Sums(loss, None, everywhere.sum(dtype=torch.float32))


def soft_class_sums(
    outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext, temperature: float = 1.0
) -> Sums:
    """Sum each sequence's cross entropy of softmax(logits / temperature), divided by the number of classes.

    The outputs are complete logits [b, m, classes] of student and teacher, labels are sequence_ids [b, s]. A right
    prediction is a sequence for which both have the same largest logit. task_distill.py of TinyBERT takes the mean over
    sequences and classes, too.
    """
    student, teacher = (logits.float() / temperature for logits in outputs)
    losses = -(teacher.softmax(-1) * student.log_softmax(-1)).mean(-1)
    counted = torch.arange(losses.shape[1], device=losses.device) < labels[0].amax(-1, keepdim=True)
    hits = (student.detach().argmax(-1) == teacher.argmax(-1)) & counted
    return Sums(losses.where(counted, 0.0).sum(), hits.sum(dtype=torch.float32), counted.sum(dtype=torch.float32))


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
