"""The unigram distribution's held-out figures, by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ctxlm_ds.benchmark.unigram import unigram_figures, unigram_loss
from tests.sample_data import DatasetWriter


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
