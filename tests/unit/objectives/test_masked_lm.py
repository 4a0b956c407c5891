"""The loss of masked LM and next sentence: sums, factors, statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.training.engine.losses import TermLosses
from tests.sections import objective_section

VOCAB_SIZE = 11


OBJECTIVE = build_objective(objective_section(name="masked_lm_nsp"))
TERMS = ("masked_lm", "next_sentence")


def loss_of(outputs: Sequence[Tensor], labels: Sequence[Tensor], factors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    losses = TermLosses(OBJECTIVE.terms, OBJECTIVE.outputs, ParallelContext())
    assert (losses.outputs, losses.label_fields) == (OBJECTIVE.outputs, ("masked_lm_labels", "next_sentence_labels"))
    named = dict(zip(losses.outputs, outputs, strict=True)), dict(zip(losses.label_fields, labels, strict=True))
    return losses(*named, factors)


def draw(dtype: torch.dtype = torch.float32) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Logits and labels of 3 rows with 4 prediction slots and 2 sequences."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, VOCAB_SIZE, generator=generator), torch.randn(3, 2, 2, generator=generator)
    words = torch.randint(5, VOCAB_SIZE, (3, 4), generator=generator)
    words[0, 2:] = words[2] = IGNORE_LABEL
    pairs = torch.tensor([[0, 1], [1, IGNORE_LABEL], [IGNORE_LABEL, IGNORE_LABEL]])
    outputs = tuple(value.to(dtype).requires_grad_() for value in logits)
    return (outputs[0], outputs[1]), (words, pairs)


def by_hand(logits: Tensor, labels: Tensor) -> tuple[float, int, int]:
    """Negative log likelihood, correct predictions and number of labels, one label at a time in Python floats."""
    loss, correct, count = 0.0, 0, 0
    for scores, label in zip(logits.detach().double().flatten(0, -2).tolist(), labels.flatten().tolist(), strict=True):
        if label != IGNORE_LABEL:
            loss += math.log(sum(math.exp(score) for score in scores)) - scores[label]
            correct += scores[label] == max(scores)
            count += 1
    return loss, correct, count


def test_loss_is_the_sum_of_each_terms_factor_times_its_sum() -> None:
    outputs, labels = draw()
    factors = torch.tensor([0.25, 3.0])
    loss, statistics = loss_of(outputs, labels, factors)
    expected = 0.0
    for term, factor, logits, term_labels in zip(TERMS, factors.tolist(), outputs, labels, strict=True):
        loss_sum, correct, count = by_hand(logits, term_labels)
        assert statistics[f"{term}/loss_sum"].item() == pytest.approx(loss_sum, rel=1e-5)
        assert statistics[f"{term}/correct"].item() == correct
        assert statistics[f"{term}/count"].item() == count
        expected += factor * loss_sum
    assert statistics["masked_lm/count"].item() == 6 and statistics["next_sentence/count"].item() == 3
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert loss.shape == () and loss.dtype == torch.float32
    assert not any(value.requires_grad for value in statistics.values())
