"""Losses: of a micro-batch, the sum of each term times its factor; of a step, each term's mean over its predictions.

A choice of tokens by the model's logits can take their place in a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ctxlm_ds.kernels.dropout import in_pieces
from ctxlm_ds.objectives.base import LossTerm
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import first_largest, first_over_ranks
from ctxlm_ds.registry import load_object

Sums = dict[str, Tensor]
"""`TERM/loss_sum`, `TERM/correct` and `TERM/count` of every term."""
SUMS = ("loss_sum", "correct", "count")
LARGEST_EXPONENT = 700.0
"""exp() of more is not a double."""


class TermLosses:
    """Computes an objective's terms from named outputs and labels."""

    def __init__(self, terms: Sequence[LossTerm], outputs: Sequence[str], parallel: ParallelContext) -> None:
        """Prepare the terms; `outputs` are the model's tensors that the objective needs, other labels are fields."""
        self._terms = [(term, partial(load_object(term.reduce), **term.settings)) for term in terms]
        self._parallel = parallel
        self.outputs = tuple(outputs)
        """Tensors that the model must return."""
        labels = dict.fromkeys(name for term in terms for name in term.labels)
        self.label_fields = tuple(name for name in labels if name not in self.outputs)
        """Fields of the batch that terms use as labels."""

    def __call__(
        self, outputs: Mapping[str, Tensor], labels: Mapping[str, Tensor], factors: Tensor
    ) -> tuple[Tensor, Sums]:
        """Add up the terms; `factors` [terms] fp32 are weight over count in the step, times what the engine divides by.

        Return the fp32 loss (exactly 0 with zero gradients if there is nothing to predict), and detached fp32 sums for
        the metrics. All tensor-parallel ranks return the same.
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


def add_into(sums: Sums, stats: Sums) -> None:
    """Add one micro-batch's sums into `sums`, in fp64."""
    for name, value in stats.items():
        sums[name] = sums[name] + value.double() if name in sums else value.double()


def means(terms: Sequence[LossTerm], sums: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return loss and accuracy of each term over its predictions; 0 for a term without any."""
    losses, accuracy = {}, {}
    for term in terms:
        loss_sum, correct, count = (sums[f"{term.name}/{name}"] for name in SUMS)
        losses[term.name] = loss_sum / count if count else 0.0
        if term.has_accuracy:
            accuracy[term.name] = correct / count if count else 0.0
    return losses, accuracy


def weighted_total(terms: Sequence[LossTerm], losses: Mapping[str, float]) -> float:
    """Return the step's loss: the terms' means added with their weights."""
    return sum(term.weight * losses[term.name] for term in terms)


def perplexity(terms: Sequence[LossTerm], losses: Mapping[str, float]) -> dict[str, float]:
    """Return exp of the mean loss per token of the term that has a perplexity; of several, each by its name."""
    found = [term.name for term in terms if term.has_perplexity]
    return {
        "perplexity" if len(found) == 1 else f"{name}_perplexity": (
            math.inf if losses[name] > LARGEST_EXPONENT else math.exp(losses[name])
        )
        for name in found
    }


def word_perplexity(perplexity: float, tokens_per_word: float) -> float:
    """Return exp of the total loss per word: of the mean loss per token times the tokens per word (Merity 2017)."""
    exponent = math.log(perplexity) * tokens_per_word
    return math.inf if exponent > LARGEST_EXPONENT else math.exp(exponent)


class TokenChoice:
    """Chooses the next token of each row; it has the place of the losses in a pass.

    Shape letters: b rows, s positions, p prediction slots, v vocabulary, n tensor-parallel ranks.
    """

    label_fields: tuple[str, ...] = ()

    def __init__(self, output: str, temperature: float, parallel: ParallelContext) -> None:
        """Choose from the logits that the model calls `output`; a temperature of 0 takes the largest."""
        self.outputs: tuple[str, ...] = (output,)
        self.places: list[int] = []
        """Position of the last token of each row of the next pass."""
        self.keys: list[int] = []
        """Key of each row's draws."""
        self.chosen: list[int] = []
        """Tokens of the last pass; empty on other pipeline stages than the last."""
        self._output = output
        self._temperature = temperature
        self._parallel = parallel

    def __call__(
        self, outputs: Mapping[str, Tensor], labels: Mapping[str, Tensor], factors: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Choose from logits [b, s, v / n], or [b·s, v / n] under sequence parallelism; no loss and no sums.

        A rank of context parallelism chooses 0 for rows whose last token another rank has.
        """
        logits, places = outputs[self._output], torch.tensor(self.places, device=factors.device)
        rows = logits.flatten(0, -2).unflatten(0, (len(places), -1))
        own, here = self._own(places, rows.shape[1])
        last = rows[torch.arange(len(places), device=places.device), own].float()
        if self._temperature:
            keys, words = torch.tensor(self.keys, device=places.device), last.shape[-1]
            largest, word = in_pieces(last / self._temperature, places, keys, self._parallel.rank * words)
            chosen = first_over_ranks(largest, word, words, self._parallel)
        else:
            chosen = first_largest(last, self._parallel)
        self.chosen = (chosen * here).tolist()
        return factors.new_zeros(()), {}

    def _own(self, places: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return places among those of this rank of context parallelism, 0 for others, and whether it has them."""
        own = places - self._parallel.context_rank * length
        here = (own >= 0) & (own < length)
        return own * here, here


class MaskChoice(TokenChoice):
    """Chooses the most probable word of some prediction slots; `places` counts the slots of all rows."""

    def __call__(
        self, outputs: Mapping[str, Tensor], labels: Mapping[str, Tensor], factors: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Choose from logits [b, p, v / n] of p slots a row; no loss and no sums."""
        slots = outputs[self._output].flatten(0, -2)
        own, here = self._own(torch.tensor(self.places, device=factors.device), len(slots))
        self.chosen = (first_largest(slots[own].float(), self._parallel) * here).tolist()
        return factors.new_zeros(()), {}
