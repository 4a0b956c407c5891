"""Masked language modelling, alone (RoBERTa) or with next-sentence prediction (BERT): corruption and loss.

In: samples (in the loader's workers), the model's logits and the labels (in training). Out: examples, the loss.
Shape letters: b rows, p prediction slots, m sequences of a row, v vocabulary of this tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.sample import Examples, Samples
from ctxlm_ds.objectives.corruption import MaskedTokenCorruption
from ctxlm_ds.objectives.losses import weighted_loss

if TYPE_CHECKING:
    from torch import Tensor

    from ctxlm_ds.parallel.context import ParallelContext


class MaskedLM:
    """The objective of BERT and RoBERTa; `terms` name its losses in the order of the model's outputs."""

    def __init__(self, corruption: MaskedTokenCorruption, terms: tuple[str, ...]) -> None:
        self.corruption = corruption
        self.terms = terms

    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> Examples:
        """Choose and replace the tokens to predict, at most budgets[i] in sample i (objectives/corruption.py)."""
        return self.corruption.corrupt_batch(samples, key, budgets)

    def loss(
        self,
        outputs: Sequence[Tensor],
        labels: Sequence[Tensor],
        factors: Tensor,
        parallel: ParallelContext | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs masked_lm [b, p, v], next_sentence [b, m, 2]; labels [b, p], [b, m] (losses.weighted_loss)."""
        return weighted_loss(self.terms, outputs, labels, factors, parallel)
