"""Losses between a model and its teacher: soft targets over the vocabulary of all ranks, and angles of hidden states.

Shape letters: k positions, v vocabulary, n tensor-parallel ranks, t tokens, h width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
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
    student, teacher = (logits.flatten(0, -2).float() / temperature for logits in outputs)
    counted = labels[0].flatten() != IGNORE_LABEL
    log_student, log_teacher = log_softmax(student, parallel), log_softmax(teacher, parallel)
    probabilities = log_teacher.exp()
    # Padding rows of the table have logits of -inf in both models.
    difference = (log_teacher - log_student).masked_fill(probabilities == 0.0, 0.0)
    divergences = reduce_from_ranks((probabilities * difference).sum(-1), parallel)
    largest = [first_largest(logits.detach(), parallel) for logits in (student, teacher)]
    hits = (largest[0] == largest[1]) & counted
    loss = temperature**2 * divergences.where(counted, 0.0).sum()
    return Sums(loss, hits.sum(dtype=torch.float32), counted.sum(dtype=torch.float32))


def log_softmax(logits: Tensor, parallel: ParallelContext) -> Tensor:
    """Return log probabilities [k, v / n] of this rank's words, over the words of all ranks."""
    if parallel.size == 1:
        return logits.log_softmax(-1)
    largest = all_reduce(logits.detach().amax(-1, keepdim=True), parallel, dist.ReduceOp.MAX)
    shifted = logits - largest
    return shifted - reduce_from_ranks(shifted.exp().sum(-1, keepdim=True), parallel).log()


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
    alike = torch.ones_like(student[:, 0])
    loss = F.cosine_embedding_loss(student, teacher, alike, reduction="none").where(counted, 0.0).sum()
    if parallel.splits_tokens:
        loss = reduce_from_ranks(loss, parallel)
    return Sums(loss, None, everywhere.sum(dtype=torch.float32))
