"""Causal language modelling (GPT): every position predicts the next token of its own text.

In: samples of `blocks` (in the loader's workers), the model's logits and the labels (in training). Out: examples, the
loss. Shape letters: b rows, s positions, v vocabulary of this tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.collate import CAUSAL_LM
from ctxlm_ds.data.sample import Example, Sample
from ctxlm_ds.objectives.losses import weighted_loss

if TYPE_CHECKING:
    from torch import Tensor

    from ctxlm_ds.data.randomness import SampleDraws
    from ctxlm_ds.parallel.context import ParallelContext


class CausalLM:
    """The objective of GPT; nothing is replaced and nothing is drawn."""

    terms: tuple[str, ...] = (CAUSAL_LM,)

    def corrupt_batch(self, samples: Sequence[Sample], draws: SampleDraws, budgets: NDArray[np.int64]) -> list[Example]:
        """All tokens but the last as inputs, all but the first as their labels."""
        return [
            Example(
                input_ids=sample.input_ids[:-1],
                token_type_ids=sample.token_type_ids[:-1],
                prediction_positions=np.arange(len(sample.input_ids) - 1, dtype=np.int64),
                prediction_labels=sample.input_ids[1:],
                is_random_next=sample.is_random_next,
            )
            for sample in samples
        ]

    def loss(
        self,
        outputs: Sequence[Tensor],
        labels: Sequence[Tensor],
        factors: Tensor,
        parallel: ParallelContext | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs causal_lm [b, s, v] (or [b·s, v]); labels [b, s] (losses.weighted_loss)."""
        return weighted_loss(self.terms, outputs, labels, factors, parallel)
