"""The objective of GPT: shifted labels, and a loss that is an exact mean over a whole step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.objectives.causal_lm import CausalLMSection
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.training.engine.losses import TermLosses
from tests.ragged import text_examples

VOCAB_SIZE = 11


def loss_of(logits: Tensor, labels: Tensor, factors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    objective = build_objective(CausalLMSection())
    losses = TermLosses(objective.terms, objective.outputs, ParallelContext())
    return losses({"logits": logits}, {"causal_lm_labels": labels}, factors)


def test_inputs_are_all_but_the_last_and_labels_all_but_the_first() -> None:
    first, second, third = text_examples([np.array(ids) for ids in ([7, 8, 9, 3], [5, 3], [4, 6, 8])])
    assert first.input_ids.tolist() == [7, 8, 9] and first.prediction_labels.tolist() == [8, 9, 3]
    assert first.prediction_positions.tolist() == [0, 1, 2]
    assert second.input_ids.tolist() == [5] and second.prediction_labels.tolist() == [3]
    assert second.prediction_positions.tolist() == [0] and third.prediction_positions.tolist() == [0, 1]
    assert third.input_ids.tolist() == [4, 6] and third.prediction_labels.tolist() == [6, 8]
    assert not first.token_type_ids.any() and first.sequence_label == NO_LABEL


def test_micro_batches_of_unequal_counts_add_up_to_the_mean_of_the_step() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, VOCAB_SIZE, generator=generator, requires_grad=True)
    labels = torch.randint(0, VOCAB_SIZE, (4, 6), generator=generator)
    labels[0, 2:] = labels[3] = IGNORE_LABEL
    factors = torch.tensor([1.0 / int((labels != IGNORE_LABEL).sum())])
    rows = [loss_of(logits[i : i + 1], labels[i : i + 1], factors) for i in range(4)]
    loss = torch.stack([value for value, _ in rows]).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    wanted = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_LABEL)
    (wanted_gradient,) = torch.autograd.grad(wanted, logits)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradient, wanted_gradient)
    assert rows[3][0].item() == 0.0
    correct = sum(statistics["causal_lm/correct"] for _, statistics in rows)
    assert correct == (logits.argmax(-1) == labels).sum()


@pytest.mark.parametrize("shape", [(2, 3, VOCAB_SIZE), (6, VOCAB_SIZE)])
def test_flattened_logits_give_the_same_loss(shape: tuple[int, ...]) -> None:
    logits = torch.randn(2, 3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([[1, 2, IGNORE_LABEL], [3, 4, 5]])
    expected = -torch.log_softmax(logits, -1)[[0, 0, 1, 1, 1], [0, 1, 0, 1, 2], [1, 2, 3, 4, 5]].sum()
    loss, _ = loss_of(logits.reshape(shape), labels, torch.ones(1))
    torch.testing.assert_close(loss, expected)
