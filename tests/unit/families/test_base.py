"""The settings that transformers share: what they answer, and values that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from ctxlm_ds.families.base import TransformerSection, nearest_divisor
from ctxlm_ds.recipe.sections import DataSection

DATA = DataSection(sample_format="x", seq_length=128)


def section(**settings: Any) -> TransformerSection:
    return TransformerSection(family="x", **settings)


@pytest.mark.parametrize(
    ("hidden", "attention", "drops"), [(0.0, 0.0, False), (0.1, 0.0, True), (0.0, 0.1, True)]
)  # fmt: skip
def test_either_dropout_drops(hidden: float, attention: float, drops: bool) -> None:
    assert section(hidden_dropout=hidden, attention_dropout=attention).drops is drops


@pytest.mark.parametrize(
    ("settings", "path", "text"),
    [
        ({"num_attention_heads": 7}, "model.num_attention_heads", "7 does not divide model.hidden_size 768; 6 does"),
        ({"hidden_dropout": 1.0}, "model.hidden_dropout", "1 drops everything"),
        ({"attention_dropout": 1.0}, "model.attention_dropout", "1 drops everything"),
    ],
)
def test_values_that_cannot_be(settings: dict[str, Any], path: str, text: str) -> None:
    (problem,) = section(**settings).problems()
    assert problem.path == path and problem.text.startswith(text)


def test_rows_are_no_longer_than_the_table() -> None:
    assert list(section(max_position_embeddings=128).row_problems(DATA)) == []
    (problem,) = section(max_position_embeddings=127).row_problems(DATA)
    assert problem.path == "data.seq_length"
    assert problem.text.startswith("128 is longer than model.max_position_embeddings 127")


@pytest.mark.parametrize(
    ("size", "settings", "refused"),
    [
        (3, {"intermediate_size": 3072}, []),
        (8, {}, ["8 does not divide model.num_attention_heads 12, and every rank holds complete heads; 1, 2, 3, 4, 6"]),
        (4, {"intermediate_size": 102}, ["4 does not divide model.intermediate_size 102, whose rows the ranks share"]),
        (5, {"intermediate_size": 102}, ["5 does not divide model.num_att", "5 does not divide model.intermediate"]),
    ],
)
def test_ranks_share_heads_and_feed_forward(size: int, settings: dict[str, Any], refused: list[str]) -> None:
    found = [problem.text for problem in section(**settings).tensor_parallel_problems(size)]
    assert len(found) == len(refused)
    assert all(text.startswith(begin) for text, begin in zip(found, refused, strict=True)), found


@pytest.mark.parametrize(
    ("number", "wanted", "nearest"), [(768, 7, 6), (12, 12, 12), (7, 4, 1), (10, 100, 10), (9, 2, 1)]
)
def test_the_nearest_divisor(number: int, wanted: int, nearest: int) -> None:
    assert nearest_divisor(number, wanted) == nearest
