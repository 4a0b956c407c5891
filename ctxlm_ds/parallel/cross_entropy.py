"""Cross entropy over a vocabulary that is whole, or split over the tensor-parallel ranks (megatron-core's).

Shape letters: v vocabulary, n tensor-parallel ranks, k labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.data.sample import IGNORE_LABEL
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.mappings import all_reduce


class Sums(NamedTuple):
    """fp32 sums of one loss term over a micro-batch, the same on every tensor-parallel rank."""

    loss: Tensor
    correct: Tensor | None
    """Right predictions; None if the term has no such thing."""
    count: Tensor
    """What the loss is divided by (LossTerm.count)."""


def vocabulary_sums(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Sum the cross entropy of logits [..., v / n] of this rank's words with labels [...], over all words."""
    if parallel.size == 1:
        return classification_sums(outputs, labels, parallel)
    (logits,), (label,) = outputs, labels
    from ctxlm_ds.parallel.megatron import vocab_parallel_cross_entropy

    flat_logits, flat_labels = logits.flatten(0, -2), label.flatten()
    counted = flat_labels != IGNORE_LABEL
    correct = ((_first_largest(flat_logits.detach(), parallel) == flat_labels) & counted).sum(dtype=torch.float32)
    # Three all-reduces of an fp32 number a label: the largest logit, the label's, the sum of exponentials.
    for _ in range(3):
        parallel.traffic.add("all_reduce", flat_labels.numel() * 4)
    losses = vocab_parallel_cross_entropy(flat_logits, flat_labels.where(counted, 0))
    loss_sum = losses.where(counted, 0.0).sum()
    return Sums(loss_sum, correct, counted.sum(dtype=torch.float32))


def classification_sums(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Sum the cross entropy of logits [..., v], which every rank holds whole, with labels [...]."""
    (logits,), (label,) = outputs, labels
    flat_logits, flat_labels = logits.flatten(0, -2), label.flatten()
    loss_sum = F.cross_entropy(flat_logits.float(), flat_labels, ignore_index=IGNORE_LABEL, reduction="sum")
    correct = (flat_logits.detach().argmax(dim=-1) == flat_labels).sum(dtype=torch.float32)
    count = (flat_labels != IGNORE_LABEL).sum(dtype=torch.float32)
    return Sums(loss_sum, correct, count)


def _first_largest(logits: Tensor, parallel: ParallelContext) -> Tensor:
    """logits [k, v / n] -> [k] the word with the largest one over all ranks, the first of equals (as argmax)."""
    words_per_rank = logits.shape[-1]
    largest, word = logits.max(dim=-1)
    largest, word = largest.float(), word + parallel.rank * words_per_rank
    overall = all_reduce(largest.clone(), parallel, dist.ReduceOp.MAX)
    beyond = parallel.size * words_per_rank
    return all_reduce(word.where(largest == overall, beyond), parallel, dist.ReduceOp.MIN)
