"""Losses over the vocabulary of one rank or of all tensor-parallel ranks, and between a model and its teacher.

Shape letters: v vocabulary, n tensor-parallel ranks, k labels or positions, t tokens, h width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.mappings import all_reduce, own_positions, own_tokens, reduce_from_ranks


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

    Args:
        outputs: hidden states [..., h] of both; under sequence parallelism those of this rank's tokens.
        labels: sequence_ids [b, s] of complete rows, 0 at padding.
        parallel: the ranks that share the tokens.
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
