"""Words counted from tokens are those of the text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.stream.held_out import word_counts
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer

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
