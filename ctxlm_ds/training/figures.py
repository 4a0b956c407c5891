"""A step's figures: the objective's sums added up over micro-batches, then each term's means.

Held-out figures also have the perplexity of a causal language model. In: `TERM/loss_sum`, `TERM/correct`, `TERM/count`
as an objective gives them. Out: losses and accuracies by term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ctxlm_ds.data.stream.collate import CAUSAL_LM

LARGEST_EXPONENT = 700.0
"""Beyond it exp() leaves the range of a double."""


def add_into(sums: dict[str, torch.Tensor], stats: Mapping[str, torch.Tensor]) -> None:
    """Add one micro-batch's sums into `sums`, in fp64."""
    for name, value in stats.items():
        sums[name] = sums[name] + value.double() if name in sums else value.double()


def means(terms: Sequence[str], figures: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Loss and accuracy of each term over its own predictions; 0 for a term without any."""
    losses, accuracy = {}, {}
    for term in terms:
        count = figures[f"{term}/count"]
        losses[term] = figures[f"{term}/loss_sum"] / count if count else 0.0
        accuracy[term] = figures[f"{term}/correct"] / count if count else 0.0
    return losses, accuracy


def perplexity(losses: Mapping[str, float]) -> dict[str, float]:
    """exp of causal_lm's mean loss a token, under its name; nothing for other objectives."""
    if CAUSAL_LM not in losses:
        return {}
    loss = losses[CAUSAL_LM]
    return {"perplexity": math.inf if loss > LARGEST_EXPONENT else math.exp(loss)}


def format_terms(terms: Mapping[str, float]) -> str:
    """`masked_lm 7.1, next_sentence 0.6`."""
    return ", ".join(f"{name} {value}" for name, value in terms.items())
