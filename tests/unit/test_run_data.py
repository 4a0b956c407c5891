"""Tokens per word of held-out rows, and words counted from tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.objectives.base import LossTerm
from ctxlm_ds.run_data import WordCounts, tokens_per_word, word_counts
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer

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


TEXTS = [
    "The quick brown fox jumps over the lazy dog, isn't it? Yes.",
    "def  f(x):\n    return x + 1\n\n\tpass\r\n",
    "Ünïcödé — “quotes” … naïve 漢字 かな.",
    "  leading and trailing  ",
    "a",
]


def trained(kind: str, folder: Path) -> Tokenizer:
    settings = {"byte_fallback": True, "normalization": "identity"} if kind == "sentencepiece-bpe" else {}
    size = {"gpt2": 320, "bpe": 330, "sentencepiece-bpe": 400}.get(kind, 120)
    return train_tokenizer(kind, iter(TEXTS * 20), size, folder / kind, **settings)


@pytest.mark.parametrize("kind", ["gpt2", "bpe", "sentencepiece-bpe"])
def test_counts_are_those_of_split(kind: str, tmp_path: Path) -> None:
    tokenizer = trained(kind, tmp_path)
    table = word_counts(tokenizer)
    assert table is not None
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        previous = np.array([tokenizer.sep_id, *ids[:-1]])
        assert table.count(previous, np.array(ids)) == len(text.split()), text


def test_a_word_begins_where_its_first_character_is_predicted(tmp_path: Path) -> None:
    tokenizer = trained("gpt2", tmp_path)
    table = word_counts(tokenizer)
    assert table is not None
    (ids,) = tokenizer.encode_batch(["jumps over"])
    later = np.array(ids)
    assert table.count(later[:-1], later[1:]) == 1  # `over`; the first token of `jumps` is no prediction
    end = np.array([tokenizer.sep_id])
    assert table.count(later[-1:], end) == 0
    assert table.count(end, later[:1]) == 1


@pytest.mark.parametrize("kind", ["wordpiece", "gpt1"])
def test_vocabularies_without_spaces_have_no_words(kind: str, tmp_path: Path) -> None:
    assert word_counts(trained(kind, tmp_path)) is None
