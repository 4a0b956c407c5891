"""Comparisons of a student's tensors with a teacher's (test_tinybert.py of the objectives: against transformers)."""

from __future__ import annotations

import torch

from ctxlm_ds.models.parts.comparison import AttentionComparison, pair_error_sums, token_error_sums, visible_pairs
from ctxlm_ds.parallel.context import ParallelContext

IDS = torch.tensor([[1, 1, 2, 0]])


def test_pairs_are_those_of_one_sequence_without_padding() -> None:
    wanted = [[True, True, False, False], [True, True, False, False], [False, False, True, False], [False] * 4]
    assert visible_pairs(IDS)[0].tolist() == wanted


def test_sums_count_positions_and_pairs() -> None:
    error = torch.tensor([2.5])
    tokens, pairs = (sums([error], [IDS], ParallelContext()) for sums in (token_error_sums, pair_error_sums))
    assert (float(tokens.loss), float(tokens.count)) == (2.5, 3.0)
    assert (float(pairs.loss), float(pairs.count)) == (2.5, 5.0)


def test_squared_differences_are_means_over_heads_and_added_to_the_error() -> None:
    scores, theirs = torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4)
    scores[0, 0, 0, 1] = 3.0  # in a sequence
    scores[0, 1, 0, 2] = 5.0  # between two sequences
    compare = AttentionComparison(ParallelContext())
    assert compare(scores, theirs, IDS).tolist() == [4.5]
    assert compare(scores, theirs, IDS, torch.tensor([1.0])).tolist() == [5.5]


def test_low_scores_count_as_zero_in_both_models() -> None:
    scores = torch.tensor([[[[3.0, -100.0], [-250.0, 1.0]]]])
    theirs = torch.tensor([[[[1.0, 2.0], [-300.0, -99.0]]]])
    error = AttentionComparison(ParallelContext())(scores, theirs, torch.ones(1, 2, dtype=torch.int64))
    assert error.tolist() == [4.0 + 4.0 + 0.0 + 100.0**2]
