"""The loss of a step's micro-batch: each term's sum times its factor, so that a whole step adds up to exact means.

Shape letters: k labels, v vocabulary of this tensor-parallel rank, t loss terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctxlm_ds.data.stream.collate import NEXT_SENTENCE

if TYPE_CHECKING:
    from torch import Tensor

    from ctxlm_ds.parallel.context import ParallelContext


def weighted_loss(
    terms: Sequence[str],
    outputs: Sequence[Tensor],
    labels: Sequence[Tensor],
    factors: Tensor,
    parallel: ParallelContext | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the terms' losses, each its negative log likelihood summed over its labels times its factor.

    Args:
        terms: names; all but next_sentence choose a word of the vocabulary.
        outputs: logits by term, [..., v] (next_sentence: [..., 2]).
        labels: by term, [...]; IGNORE_LABEL where there is nothing to predict.
        factors: [t] fp32, one over the term's count in the whole step (times what the engine divides by).
        parallel: this rank's share of the vocabulary; None is all of it.

    Returns:
        The fp32 loss (exactly 0 with zero gradients where every label is ignored), and detached fp32 sums for the
        metrics: `TERM/loss_sum`, `TERM/correct`, `TERM/count`. Every tensor-parallel rank has the same.
    """
    from ctxlm_ds.parallel.context import ParallelContext
    from ctxlm_ds.parallel.cross_entropy import classification_sums, vocabulary_sums

    parallel = parallel or ParallelContext()
    total = factors.new_zeros(())
    statistics: dict[str, Tensor] = {}
    for index, term in enumerate(terms):
        if term == NEXT_SENTENCE:
            loss_sum, correct, count = classification_sums(outputs[index], labels[index])
        else:
            loss_sum, correct, count = vocabulary_sums(outputs[index], labels[index], parallel)
        total = total + factors[index] * loss_sum
        statistics[f"{term}/loss_sum"] = loss_sum.detach()
        statistics[f"{term}/correct"] = correct
        statistics[f"{term}/count"] = count
    return total, statistics
