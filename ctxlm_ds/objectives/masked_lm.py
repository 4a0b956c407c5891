"""Masked language modelling, alone (RoBERTa) or with next-sentence prediction (BERT): corruption and loss.

In: samples (in the loader's workers), the model's logits and the labels (in training). Out: examples, the loss.
Shape letters: b rows, p prediction slots, m sequences of a row, v vocabulary, t loss terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.sample import IGNORE_LABEL, Example, Sample
from ctxlm_ds.objectives.corruption import MaskedTokenCorruption

if TYPE_CHECKING:
    from torch import Tensor

    from ctxlm_ds.data.randomness import SampleDraws


class MaskedLM:
    """The objective of BERT and RoBERTa; `terms` name its losses in the order of the model's outputs."""

    def __init__(self, corruption: MaskedTokenCorruption, terms: tuple[str, ...]) -> None:
        self.corruption = corruption
        self.terms = terms

    def corrupt_batch(self, samples: Sequence[Sample], draws: SampleDraws, budgets: NDArray[np.int64]) -> list[Example]:
        """Choose and replace the tokens to predict, at most budgets[i] in sample i (objectives/corruption.py)."""
        return self.corruption.corrupt_batch(samples, draws, budgets)

    def loss(
        self, outputs: Sequence[Tensor], labels: Sequence[Tensor], factors: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the terms' losses, each its negative log likelihood summed over its labels times its factor.

        Args:
            outputs: logits by term: masked_lm [b, p, v], next_sentence [b, m, 2].
            labels: by term, [b, p] and [b, m]; IGNORE_LABEL where there is nothing to predict.
            factors: [t] fp32, one over the term's count in the whole step (times what the engine divides by).

        Returns:
            The fp32 loss (exactly 0 with zero gradients where every label is ignored), and detached fp32 sums for the
            metrics: `TERM/loss_sum`, `TERM/correct`, `TERM/count`.
        """
        total = factors.new_zeros(())
        statistics: dict[str, Tensor] = {}
        for index, term in enumerate(self.terms):
            loss_sum, correct, count = classification_sums(outputs[index], labels[index])
            total = total + factors[index] * loss_sum
            statistics[f"{term}/loss_sum"] = loss_sum.detach()
            statistics[f"{term}/correct"] = correct
            statistics[f"{term}/count"] = count
        return total, statistics


def classification_sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [..., v], labels [...] -> fp32 sums over the labels not ignored: cross entropy, correct argmax, labels."""
    from torch import float32
    from torch.nn import functional as F

    flat_logits, flat_labels = logits.flatten(0, -2), labels.flatten()
    loss_sum = F.cross_entropy(flat_logits.float(), flat_labels, ignore_index=IGNORE_LABEL, reduction="sum")
    correct = (flat_logits.detach().argmax(dim=-1) == flat_labels).sum(dtype=float32)
    count = (flat_labels != IGNORE_LABEL).sum(dtype=float32)
    return loss_sum, correct, count
