"""Losses between a model and its teacher: soft targets over the vocabulary of all ranks, and angles of hidden states.

Shape letters: k positions, v vocabulary, n tensor-parallel ranks, t tokens, h width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import Sums, first_largest
from ctxlm_ds.parallel.mappings import all_reduce, own_tokens, reduce_from_ranks


def soft_target_sums(
    outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext, temperature: float = 1.0
) -> Sums:
    """Sum temperature² · KL(teacher ‖ student) of softmax(logits / temperature) (Hinton 2015; Sanh 2019, section 2).

    Args:
        outputs: logits [..., v / n] of this rank's words, of student and teacher.
        labels: [...], IGNORE_LABEL at positions that do not count.
        parallel: the ranks that share the vocabulary.
        temperature: divisor of both logits.

    Returns:
        The sum, the positions at which both have the same largest logit, and the number of positions.
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
        divergences = difference.mul_(probabilities).sum(-1)
        if parallel.size > 1:
            divergences = all_reduce(divergences, parallel)
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
    largest = moved.amax(-1, keepdim=True)
    if parallel.size > 1:
        largest = all_reduce(largest, parallel, dist.ReduceOp.MAX)
    total = moved.sub_(largest).exp().sum(-1, keepdim=True)
    return moved, (all_reduce(total, parallel) if parallel.size > 1 else total).log()


def cosine_sums(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Sum 1 - cos of the angle between student's and teacher's hidden states at every token.

    Args:
        outputs: hidden states [..., h] of both; under sequence parallelism those of this rank's tokens.
        labels: sequence_ids [...], 0 at padding.
        parallel: the ranks that share the tokens.
    """
    student, teacher = (hidden.flatten(0, -2).float() for hidden in outputs)
    everywhere = labels[0].flatten() > 0
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

    task_distill.py of TinyBERT takes the mean over sequences and classes, too.

    Args:
        outputs: complete logits [b, m, classes] of student and teacher.
        labels: sequence_ids [b, s], 1 to the number of sequences of a row.
        parallel: the ranks, which hold the same.
        temperature: divisor of both logits.

    Returns:
        The sum, the sequences for which both have the same largest logit, and the number of sequences.
    """
    student, teacher = (logits.float() / temperature for logits in outputs)
    losses = -(teacher.softmax(-1) * student.log_softmax(-1)).mean(-1)
    counted = torch.arange(losses.shape[1], device=losses.device) < labels[0].amax(-1, keepdim=True)
    hits = (student.detach().argmax(-1) == teacher.argmax(-1)) & counted
    return Sums(losses.where(counted, 0.0).sum(), hits.sum(dtype=torch.float32), counted.sum(dtype=torch.float32))
