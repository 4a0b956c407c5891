"""A step's figures: the objective's sums added up over micro-batches, then each term's means.

Held-out figures also have the perplexity of a causal language model. In: `TERM/loss_sum`, `TERM/correct`, `TERM/count`
as an objective gives them. Out: losses and accuracies by term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ctxlm_ds.objectives.base import LossTerm
from ctxlm_ds.training.anomalies import Anomaly

LARGEST_EXPONENT = 700.0
"""Beyond it exp() leaves the range of a double."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Figures of one optimizer step over the whole global batch."""

    loss: float
    terms: dict[str, float]
    """Mean loss of each term over its own predictions."""
    accuracy: dict[str, float]
    grad_norm: float
    num_tokens: int
    """Non-padding positions of the global batch."""
    skipped: bool
    """True if nothing was updated: fp16 overflowed, or there is an anomaly."""
    loss_scale: float
    anomaly: Anomaly | None = None
    """Why the gradients were not applied; an fp16 overflow that the loss scale can follow is none."""


def add_into(sums: dict[str, torch.Tensor], stats: Mapping[str, torch.Tensor]) -> None:
    """Add one micro-batch's sums into `sums`, in fp64."""
    for name, value in stats.items():
        sums[name] = sums[name] + value.double() if name in sums else value.double()


FIGURES = ("loss_sum", "correct", "count")


def means(terms: Sequence[LossTerm], figures: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return loss and accuracy of each term over its own predictions; 0 for a term without any."""
    losses, accuracy = {}, {}
    for term in terms:
        count = figures[f"{term.name}/count"]
        losses[term.name] = figures[f"{term.name}/loss_sum"] / count if count else 0.0
        if term.has_accuracy:
            accuracy[term.name] = figures[f"{term.name}/correct"] / count if count else 0.0
    return losses, accuracy


def weighted_total(terms: Sequence[LossTerm], losses: Mapping[str, float]) -> float:
    """Return the step's loss: the terms' means added with their weights."""
    return sum(term.weight * losses[term.name] for term in terms)


def perplexity(terms: Sequence[LossTerm], losses: Mapping[str, float]) -> dict[str, float]:
    """Return exp of the mean loss per token of the term that has a perplexity, if one has."""
    loss = next((losses[term.name] for term in terms if term.has_perplexity), None)
    if loss is None:
        return {}
    return {"perplexity": math.inf if loss > LARGEST_EXPONENT else math.exp(loss)}


def format_terms(terms: Mapping[str, float]) -> str:
    """`masked_lm 7.1, next_sentence 0.6`."""
    return ", ".join(f"{name} {value}" for name, value in terms.items())
