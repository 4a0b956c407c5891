"""The loss of a micro-batch: the sum of each term times its factor, so that a step adds up to exact means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ctxlm_ds.objectives.base import LossTerm
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.registry import load_object

Sums = dict[str, Tensor]


class TermLosses:
    """Computes an objective's terms from named outputs and labels."""

    def __init__(self, terms: Sequence[LossTerm], outputs: Sequence[str], parallel: ParallelContext) -> None:
        """Prepare the terms; `outputs` are the model's tensors that the objective needs, other labels are fields."""
        self._terms = [(term, load_object(term.reduce)) for term in terms]
        self._parallel = parallel
        self.outputs = tuple(outputs)
        """Tensors that the model must return."""
        labels = dict.fromkeys(name for term in terms for name in term.labels)
        self.label_fields = tuple(name for name in labels if name not in self.outputs)
        """Fields of the batch that terms use as labels."""

    def __call__(
        self, outputs: Mapping[str, Tensor], labels: Mapping[str, Tensor], factors: Tensor
    ) -> tuple[Tensor, Sums]:
        """Add up the terms.

        Args:
            outputs: the model's, by name.
            labels: fields of the batch by name.
            factors: [number of terms] fp32, weight over count in the step, times what the engine divides by.

        Returns:
            The fp32 loss (exactly 0 with zero gradients if there is nothing to predict), and detached fp32 sums for
            the metrics: `TERM/loss_sum`, `TERM/correct`, `TERM/count`. All tensor-parallel ranks return the same.
        """
        total = factors.new_zeros(())
        statistics: Sums = {}
        for index, (term, reduce) in enumerate(self._terms):
            sums = reduce(
                [outputs[name] for name in term.outputs],
                [labels[name] if name in labels else outputs[name] for name in term.labels],
                self._parallel,
            )
            total = total + factors[index] * sums.loss
            statistics[f"{term.name}/loss_sum"] = sums.loss.detach()
            statistics[f"{term.name}/correct"] = torch.zeros_like(total) if sums.correct is None else sums.correct
            statistics[f"{term.name}/count"] = sums.count
        return total, statistics
