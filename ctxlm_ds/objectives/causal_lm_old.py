"""Causal language modelling (GPT): every position predicts the next token of its own text.

In: samples of `blocks` (in the loader's workers), the model's logits and the labels (in training). Out: examples, the
loss. Shape letters: b rows, s positions, v vocabulary of this tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.sample import Examples, Samples, starts_of
from ctxlm_ds.data.stream.collate import CAUSAL_LM
from ctxlm_ds.objectives.losses import weighted_loss

if TYPE_CHECKING:
    from torch import Tensor

    from ctxlm_ds.parallel.context import ParallelContext


class CausalLM:
    """The objective of GPT; nothing is replaced and nothing is drawn."""

    terms: tuple[str, ...] = (CAUSAL_LM,)

    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> Examples:
        """All tokens but the last as inputs, all but the first as their labels."""
        lengths = samples.lengths - 1
        starts = starts_of(lengths)
        is_input = np.ones(len(samples.input_ids), dtype=np.bool_)
        is_input[samples.starts[1:] - 1] = False
        is_label = np.ones(len(samples.input_ids), dtype=np.bool_)
        is_label[samples.starts[:-1]] = False
        return Examples(
            input_ids=samples.input_ids[is_input],
            starts=starts,
            second_starts=samples.second_starts,
            is_random_next=samples.is_random_next,
            prediction_positions=(np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)).astype(np.int32),
            prediction_labels=samples.input_ids[is_label],
            prediction_starts=starts,
        )

    def loss(
        self,
        outputs: Sequence[Tensor],
        labels: Sequence[Tensor],
        factors: Tensor,
        parallel: ParallelContext | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs causal_lm [b, s, v] (or [b·s, v]); labels [b, s] (losses.weighted_loss)."""
        return weighted_loss(self.terms, outputs, labels, factors, parallel)
