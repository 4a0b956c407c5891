"""Cross entropy of one process against its definition in float64 (tests/dist/test_megatron.py has several ranks)."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import (
    classification_sums,
    first_largest,
    label_losses,
    squared_totals,
    vocabulary_sums,
)

ALONE = ParallelContext()
LABELS = torch.tensor([[2, IGNORE_LABEL, 0], [4, 1, IGNORE_LABEL]])


def logits_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    drawn[0, 0, 2] = drawn[1, 0, 4] = 9.0  # two hits
    drawn[0, 2, 3] = drawn[1, 1, 0] = 9.0  # two misses
    return drawn.to(dtype)


def plain_losses(logits: torch.Tensor) -> torch.Tensor:
    """log of the sum of exponentials minus the label's logit, in float64."""
    flat, labels = logits.double().flatten(0, -2), LABELS.flatten()
    losses = flat.exp().sum(-1).log() - flat[torch.arange(6), labels.clamp(min=0)]
    return torch.where(labels == IGNORE_LABEL, 0.0, losses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_hits_and_counts(dtype: torch.dtype) -> None:
    logits = logits_of(dtype)
    expected = plain_losses(logits)
    losses, hits = label_losses(logits, LABELS, ALONE)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)
    assert losses.dtype == torch.float32 and hits.tolist() == [1, 0, 0, 1, 0, 0]
    for sums in (vocabulary_sums([logits], [LABELS], ALONE), classification_sums([logits], [LABELS], ALONE)):
        assert float(sums.loss) == pytest.approx(float(expected.sum()), rel=1e-5)
        assert sums.correct is not None and (float(sums.correct), float(sums.count)) == (2, 4)


def test_the_gradient_is_softmax_minus_one_hot_and_zero_without_a_label() -> None:
    logits = logits_of().requires_grad_()
    vocabulary_sums([logits], [LABELS], ALONE).loss.backward()
    counted = LABELS != IGNORE_LABEL
    expected = logits.detach().softmax(-1) - torch.nn.functional.one_hot(LABELS.clamp(min=0), 5)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected * counted[..., None])


def test_without_any_label_the_sum_is_zero_with_a_gradient() -> None:
    logits = logits_of().requires_grad_()
    sums = vocabulary_sums([logits], [torch.full_like(LABELS, IGNORE_LABEL)], ALONE)
    sums.loss.backward()
    assert (float(sums.loss.detach()), float(sums.count)) == (0, 0)
    assert logits.grad is not None and not logits.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squared_totals_and_their_gradient(dtype: torch.dtype) -> None:
    logits = logits_of(dtype)
    logits[..., 1] = float("-inf")  # padding of a table
    logits.requires_grad_()
    sums = squared_totals([logits], [LABELS], ALONE)
    (0.3 * sums.loss).backward()
    exact = logits.detach().double().requires_grad_()
    expected = (exact.logsumexp(-1) ** 2)[LABELS != IGNORE_LABEL].sum()
    (0.3 * expected).backward()
    assert float(sums.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert (sums.correct, float(sums.count)) == (None, 4)
    torch.testing.assert_close(logits.grad, exact.grad.to(dtype))


def test_of_equal_logits_the_first_word_wins() -> None:
    assert first_largest(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), ALONE).tolist() == [1, 0]
