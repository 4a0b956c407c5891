"""Tokens per word of held-out rows, and the unigram distribution by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.held_out import WordCounts, tokens_per_word, unigram_figures, unigram_loss
from ctxlm_ds.objectives.base import LossTerm
from tests.sample_data import DatasetWriter

TERM = LossTerm("next", ("logits",), ("labels",))
SPACE, BEGIN, INSIDE = 0, 1, 2
"""Tokens: ` `, `a` and ` a`."""
COUNTS = WordCounts(np.array([0, 0, 1]), np.array([False, True, False]), np.array([True, False, False]))


def batch(inputs: list[int], labels: list[int]) -> Batch:
    return Batch({"input_ids": torch.tensor([inputs]), "labels": torch.tensor([labels])})


def test_words_that_begin_among_the_predictions_count() -> None:
    rows = [
        batch([SPACE, BEGIN, BEGIN, INSIDE], [BEGIN, BEGIN, INSIDE, SPACE]),  # `aa a `: two words
        batch([SPACE, BEGIN, SPACE, 0], [BEGIN, SPACE, IGNORE_LABEL, IGNORE_LABEL]),
    ]
    assert tokens_per_word(rows, TERM, COUNTS) == 6 / 3


def test_there_may_be_no_word() -> None:
    assert tokens_per_word([batch([SPACE], [SPACE])], TERM, COUNTS) is None
    assert tokens_per_word([], TERM, COUNTS) is None


def test_unigram_loss_is_the_cross_entropy_by_hand(tmp_path: Path) -> None:
    for name, tokens in (("train", [1, 1, 1, 3]), ("heldout", [1, 3])):
        with DatasetWriter(tmp_path / name, "uint16") as writer:
            writer.add_sequence(tokens)
            writer.end_document()
            writer.finalize({})
    # Add-one counts over ids 0..3: 1, 4, 1, 2 of 8.
    expected = -(math.log(4 / 8) + math.log(2 / 8)) / 2
    assert unigram_loss(tmp_path / "train", tmp_path / "heldout") == pytest.approx(expected)
    assert unigram_figures(tmp_path / "train", tmp_path / "heldout") == pytest.approx((expected, 0.5))
