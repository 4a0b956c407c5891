"""Cross entropy over a vocabulary that is whole, or split over the tensor-parallel ranks (megatron-core's).

Shape letters: v vocabulary, n tensor-parallel ranks, k labels.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.data.sample import IGNORE_LABEL
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.mappings import all_reduce

Sums = tuple[Tensor, Tensor, Tensor]
"""fp32 sums over the labels not ignored: cross entropy, right predictions, labels."""


def vocabulary_sums(logits: Tensor, labels: Tensor, parallel: ParallelContext) -> Sums:
    """logits [..., v / n] of this rank's words, labels [...] -> the sums over all words, the same on every rank."""
    if parallel.size == 1:
        return classification_sums(logits, labels)
    from ctxlm_ds.parallel.megatron import vocab_parallel_cross_entropy

    flat_logits, flat_labels = logits.flatten(0, -2), labels.flatten()
    counted = flat_labels != IGNORE_LABEL
    correct = ((_first_largest(flat_logits.detach(), parallel) == flat_labels) & counted).sum(dtype=torch.float32)
    # Three all-reduces of an fp32 number a label: the largest logit, the label's, the sum of exponentials.
    for _ in range(3):
        parallel.traffic.add("all_reduce", flat_labels.numel() * 4)
    losses = vocab_parallel_cross_entropy(flat_logits, flat_labels.where(counted, 0))
    loss_sum = losses.where(counted, 0.0).sum()
    return loss_sum, correct, counted.sum(dtype=torch.float32)


def classification_sums(logits: Tensor, labels: Tensor) -> Sums:
    """logits [..., v], labels [...] -> the sums over the labels."""
    flat_logits, flat_labels = logits.flatten(0, -2), labels.flatten()
    loss_sum = F.cross_entropy(flat_logits.float(), flat_labels, ignore_index=IGNORE_LABEL, reduction="sum")
    correct = (flat_logits.detach().argmax(dim=-1) == flat_labels).sum(dtype=torch.float32)
    count = (flat_labels != IGNORE_LABEL).sum(dtype=torch.float32)
    return loss_sum, correct, count


def _first_largest(logits: Tensor, parallel: ParallelContext) -> Tensor:
    """logits [k, v / n] -> [k] the word with the largest one over all ranks, the first of equals (as argmax)."""
    words_per_rank = logits.shape[-1]
    largest, word = logits.max(dim=-1)
    largest, word = largest.float(), word + parallel.rank * words_per_rank
    overall = all_reduce(largest.clone(), parallel, dist.ReduceOp.MAX)
    beyond = parallel.size * words_per_rank
    return all_reduce(word.where(largest == overall, beyond), parallel, dist.ReduceOp.MIN)
