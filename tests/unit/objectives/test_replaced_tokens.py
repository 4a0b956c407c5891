"""ELECTRA's corruption, its samples and its loss, by the published definition (Clark 2020, section 2)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.families.electra.layers import Samples
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.context import DropoutStreams, ParallelContext
from ctxlm_ds.parallel.cross_entropy import binary_sums
from ctxlm_ds.training.engine.losses import TermLosses
from tests.sections import objective_section
from tests.unit.objectives.corruption.test_tokens import TOKENIZER, corrupt, samples_of

NAME = "replaced_tokens"
WORDS, ROWS, LENGTH, SLOTS = 50, 400, 30, 6


@pytest.mark.parametrize(("mask_prob", "length"), [(0.15, 128), (0.15, 512), (0.25, 512)])
def test_counts_and_shares_are_the_published_ones(mask_prob: float, length: int) -> None:
    """max(1, min(N, round(p·n))) with N = int((p + 0.005)·length); 85 % masked, 15 % kept (pretrain_helpers.py)."""
    samples = samples_of([length] * 1000)
    most = int((mask_prob + 0.005) * length)
    examples = corrupt(samples, budget=most, name=NAME, mask_prob=mask_prob)
    count = len(samples) * max(1, min(most, round(length * mask_prob)))
    seen = np.concatenate([example.input_ids[example.prediction_positions] for example in examples])
    masked = seen == TOKENIZER.mask_id
    kept = seen == np.concatenate([example.prediction_labels for example in examples])
    assert len(seen) == count and (masked ^ kept).all()
    assert abs(masked.mean() - 0.85) < 4 * math.sqrt(0.85 * 0.15 / count)


def fields(seed: int = 0) -> dict[str, Tensor]:
    """Rows of several lengths, the first slots of which are predictions."""
    generator = torch.Generator().manual_seed(seed)
    originals = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    lengths = torch.randint(SLOTS, LENGTH + 1, (ROWS, 1), generator=generator)
    inside = torch.arange(LENGTH)[None] < lengths
    order = torch.rand(ROWS, LENGTH, generator=generator).masked_fill(~inside, 2.0).argsort(dim=1)
    positions, used = order[:, :SLOTS], torch.arange(SLOTS)[None] < torch.randint(1, SLOTS + 1, (ROWS, 1))
    labels = originals.gather(1, positions).where(used, IGNORE_LABEL)
    masked = originals.scatter(1, positions, originals.gather(1, positions).masked_fill(used, WORDS - 1))
    return {
        "originals": originals * inside, "input_ids": masked * inside, "sequence_ids": inside.long(),
        "positions": positions * used, "labels": labels,
    }  # fmt: skip


def sample(logits: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    streams = DropoutStreams(1, enabled=True)
    streams.num_layers = 1
    streams.begin(0, 0, torch.device("cpu"))
    streams.use(streams.layer(0))
    kernels = KernelSet({}, "cpu", torch.float32)
    layer = Samples(kernels, ParallelContext(dropout=streams))
    return layer(logits, *(given[name] for name in ("input_ids", "sequence_ids", "positions", "labels")))


def test_samples_replace_the_predicted_tokens_only_and_labels_are_the_differences() -> None:
    given = fields()
    ids, replaced = sample(torch.randn(ROWS, SLOTS, WORDS, generator=torch.Generator().manual_seed(2)), given)
    inside = given["sequence_ids"] > 0
    predicted = torch.zeros_like(inside)
    for row, (positions, labels) in enumerate(zip(given["positions"], given["labels"], strict=True)):
        predicted[row, positions[labels != IGNORE_LABEL]] = True
    assert torch.equal(ids[~predicted], given["originals"][~predicted])
    assert torch.equal(replaced == 1, ids != given["originals"])
    assert torch.equal(replaced == IGNORE_LABEL, ~inside)
    assert 0 < int((replaced == 1).sum()) < int(predicted.sum())  # some samples are right


def test_a_uniform_generator_is_wrong_as_often_as_it_should_be() -> None:
    given = fields()
    _, replaced = sample(torch.zeros(ROWS, SLOTS, WORDS), given)
    count, share = int((given["labels"] != IGNORE_LABEL).sum()), 1 - 1 / WORDS
    assert abs(int((replaced == 1).sum()) / count - share) < 4 * math.sqrt(share * (1 - share) / count)


def test_a_certain_generator_replaces_nothing() -> None:
    given = fields()
    logits = 1e4 * functional.one_hot(given["labels"].clamp(min=0), WORDS).float()
    ids, replaced = sample(logits, given)
    assert torch.equal(ids, given["originals"]) and int((replaced == 1).sum()) == 0


def test_loss_and_gradients_are_those_of_the_weighted_sum_of_two_means() -> None:
    objective = build_objective(objective_section(name=NAME, generator_weight=0.5, discriminator_weight=20.0))
    given, generator = fields(), torch.Generator().manual_seed(5)
    logits = torch.randn(ROWS, SLOTS, WORDS, generator=generator).requires_grad_()
    scores = torch.randn(ROWS, LENGTH, generator=generator).requires_grad_()
    _, replaced = sample(logits.detach(), given)
    outputs = dict(zip(objective.outputs, (logits, scores, replaced), strict=True))
    positions = objective.terms[1].count({"sequence_ids": given["sequence_ids"].numpy()})
    counts = [int((given["labels"] != IGNORE_LABEL).sum()), positions]
    factors = torch.tensor([term.weight / count for term, count in zip(objective.terms, counts, strict=True)])
    loss, _ = TermLosses(objective.terms, objective.outputs, ParallelContext())(
        outputs, {"masked_lm_labels": given["labels"]}, factors
    )
    inside = given["sequence_ids"] > 0
    words = functional.cross_entropy(logits.flatten(0, 1).double(), given["labels"].flatten())
    found = functional.binary_cross_entropy_with_logits(scores[inside].double(), replaced[inside].double())
    wanted = 0.5 * words + 20.0 * found
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    gradients = (torch.autograd.grad(total, (logits, scores)) for total in (loss, wanted))
    for ours, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


def test_binary_sums_by_hand() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.0, 5.0]], requires_grad=True)
    sums = binary_sums([logits], [torch.tensor([[1, 1, 0, IGNORE_LABEL]])], ParallelContext())
    wanted = math.log1p(math.exp(-2.0)) + math.log1p(math.exp(1.0)) + math.log(2.0)
    assert float(sums.loss.detach()) == pytest.approx(wanted, rel=1e-6)
    assert (float(sums.correct), float(sums.count)) == (2.0, 3.0)
    sums.loss.backward()
    assert logits.grad[0, 3] == 0.0
