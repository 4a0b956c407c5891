"""Metrics of a step: the objective's sums added over micro-batches, then the means of each term."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ctxlm_ds.objectives.base import LossTerm
from ctxlm_ds.training.anomalies import Anomaly

LARGEST_EXPONENT = 700.0
"""exp() of more is not a double."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Metrics of one optimizer step over the global batch."""

    loss: float
    terms: dict[str, float]
    """Mean loss of each term over its predictions."""
    accuracy: dict[str, float]
    grad_norm: float
    num_tokens: int
    """Non-padding positions of the global batch."""
    skipped: bool
    """True if nothing was updated: fp16 overflowed, or there is an anomaly."""
    loss_scale: float
    anomaly: Anomaly | None = None
    """Why the gradients were not applied; None for an fp16 overflow that a lower loss scale handles."""


def add_into(sums: dict[str, torch.Tensor], stats: Mapping[str, torch.Tensor]) -> None:
    """Add one micro-batch's sums into `sums`, in fp64."""
    for name, value in stats.items():
        sums[name] = sums[name] + value.double() if name in sums else value.double()


SUMS = ("loss_sum", "correct", "count")
"""What an objective returns of each term, as `TERM/SUM`."""


def means(terms: Sequence[LossTerm], sums: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return loss and accuracy of each term over its predictions; 0 for a term without any."""
    losses, accuracy = {}, {}
    for term in terms:
        count = sums[f"{term.name}/count"]
        losses[term.name] = sums[f"{term.name}/loss_sum"] / count if count else 0.0
        if term.has_accuracy:
            accuracy[term.name] = sums[f"{term.name}/correct"] / count if count else 0.0
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
    """Format losses as `masked_lm 7.1, next_sentence 0.6`."""
    return ", ".join(f"{name} {value}" for name, value in terms.items())
