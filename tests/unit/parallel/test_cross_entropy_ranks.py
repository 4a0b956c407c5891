"""Sums over a vocabulary split over 8 and 64 ranks in one process, against the whole one in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.parallel.cross_entropy import first_largest, soft_target_sums, squared_totals
from tests.local_ranks import assert_each, drawn, local_ranks, needs_local_tensors, of_leaf, values

pytestmark = [needs_local_tensors, pytest.mark.long]
WORDS, ROWS, TEMPERATURE = 4, 14, 2.0
"""Words of a rank."""


@pytest.mark.parametrize("size", [8, 64])
def test_squares_and_divergences_of_a_teacher(size: int) -> None:
    student, teacher = drawn(1, ROWS, size * WORDS), drawn(2, ROWS, size * WORDS).detach()
    labels = torch.zeros(ROWS, dtype=torch.int64)
    labels[::7] = IGNORE_LABEL
    teacher[1] = student.detach()[1]
    counted = labels != IGNORE_LABEL
    squares = student.logsumexp(-1).square()[counted].sum()
    log_student, log_teacher = (F.log_softmax(logits / TEMPERATURE, -1) for logits in (student, teacher))
    divergences = F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1)
    divergence = TEMPERATURE**2 * divergences[counted].sum()
    (squares + divergence).backward()
    hits = ((student.argmax(-1) == teacher.argmax(-1)) & counted).sum()
    assert 0 < int(hits) < ROWS
    with local_ranks(size) as ranks:
        parallel = ranks.context()
        own, theirs, wanted = ranks.split(student, 1), ranks.split(teacher, 1), ranks.whole(labels)
        found_squares = squared_totals([own], [wanted], parallel).loss
        found = soft_target_sums([own, theirs], [wanted], parallel, TEMPERATURE)
        (found_squares + found.loss).backward()
        words = first_largest(own.detach(), parallel)
    # The sums are fp32.
    assert_each(found_squares, [squares.detach()] * size, rtol=1e-6)
    assert_each(found.loss, [divergence.detach()] * size, rtol=1e-5)
    assert found.correct is not None and {int(value) for value in values(found.correct)} == {int(hits)}
    assert_each(words, [student.argmax(-1)] * size)
    assert_each(of_leaf(own), list(of_leaf(student).chunk(size, -1)), rtol=1e-5, atol=1e-6)
