"""The loss of a step's micro-batch: each term's sum times its factor, so that a whole step adds up to exact means.

In: an objective's terms, the model's outputs and the labels by name. Out: the loss to go backward from, and sums for
the metrics. Not here: the reductions (parallel/cross_entropy.py), factors (engine.py). Shape letter: t loss terms.
"""

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
        """`outputs` are the tensors that the objective needs from the model; every other label is a field."""
        self._terms = [(term, load_object(term.reduce)) for term in terms]
        self._parallel = parallel
        self.outputs = tuple(outputs)
        """Tensors that the model must return."""
        labels = dict.fromkeys(name for term in terms for name in term.labels)
        self.label_fields = tuple(name for name in labels if name not in self.outputs)
        """Fields of the batch that the terms compare them with."""

    def __call__(
        self, outputs: Mapping[str, Tensor], labels: Mapping[str, Tensor], factors: Tensor
    ) -> tuple[Tensor, Sums]:
        """Add up the terms.

        Args:
            outputs: the model's, by name.
            labels: fields of the batch by name.
            factors: [t] fp32, a term's weight over its count in the whole step (times what the engine divides by).

        Returns:
            The fp32 loss (exactly 0 with zero gradients if there is nothing to predict), and detached fp32 sums for
            the metrics: `TERM/loss_sum`, `TERM/correct`, `TERM/count`. Every tensor-parallel rank has the same.
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
