"""Losses between a model and its teacher, by their definitions in float64 (tests/families has several ranks)."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import cosine_sums, soft_target_sums

ALONE = ParallelContext()
LABELS = torch.tensor([[1, IGNORE_LABEL, 1]])


def drawn(seed: int, columns: int = 5) -> torch.Tensor:
    return torch.randn(1, 3, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("padded", [False, True])
def test_soft_targets_are_the_divergence_of_tempered_softmaxes(temperature: float, padded: bool) -> None:
    student, teacher = drawn(0).requires_grad_(), drawn(1)
    if padded:  # a row of the table without a word
        row = torch.full((1, 3, 1), float("-inf"))
        found = soft_target_sums(
            [torch.cat([student, row], -1), torch.cat([teacher, row], -1)], [LABELS], ALONE, temperature
        )
    else:
        found = soft_target_sums([student, teacher], [LABELS], ALONE, temperature)
    p, q = (torch.log_softmax(logits.detach().double() / temperature, -1) for logits in (teacher, student))
    divergences = (p.exp() * (p - q)).sum(-1)[0] * temperature**2
    assert found.loss.item() == pytest.approx(float(divergences[0] + divergences[2]), rel=1e-5)
    assert float(found.count) == 2
    same = (student.argmax(-1) == teacher.argmax(-1))[0]
    assert found.correct is not None and float(found.correct) == float(same[0]) + float(same[2])
    found.loss.backward()
    expected = temperature * (q.exp() - p.exp())
    assert student.grad is not None and not student.grad[0, 1].any()
    torch.testing.assert_close(student.grad[0, ::2].double(), expected[0, ::2], rtol=1e-4, atol=1e-6)


def test_angles_are_those_at_tokens() -> None:
    student, teacher = drawn(3), drawn(4)
    found = cosine_sums([student, teacher], [torch.tensor([[1, 2, 0]])], ALONE)
    cosines = torch.nn.functional.cosine_similarity(student.double(), teacher.double(), dim=-1)[0]
    assert float(found.loss) == pytest.approx(float(2 - cosines[0] - cosines[1]), rel=1e-5)
    assert float(found.count) == 2 and found.correct is None
    assert float(cosine_sums([student, 3 * student], [torch.tensor([[1, 1, 1]])], ALONE).loss) == pytest.approx(
        0, abs=1e-5
    )
