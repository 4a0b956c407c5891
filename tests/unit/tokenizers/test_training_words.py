"""Words of the training text: long ones are cut, a text with a NUL is one text."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from ctxlm_ds.tokenizers.train import tokenizer_types, train_tokenizer
from ctxlm_ds.tokenizers.training_words import count_words, cut_long_words
from tests.unit.tokenizers.conftest import TEXTS


def test_a_text_with_a_nul_is_one_text(tmp_path: Path) -> None:
    for kind in tokenizer_types():
        tokenizer = train_tokenizer(kind, iter(["the quiet\x00harbour " * 30, *TEXTS]), 700, tmp_path / kind)
        assert tokenizer.encode_batch(["the quiet"])[0]


@pytest.mark.parametrize(("kind", "length"), [("bpe", 300_000), ("gpt2", 60_000), ("gpt1", 60_000)])
def test_long_words_are_cut_for_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str, length: int
) -> None:
    """300,000 characters take minutes if the trainer sees them complete."""
    rng = random.Random(0)
    repeated = [text * (length // len(text)) for text in ("0123456789", "-=*+", " \t")]
    longs = ["".join(rng.choices("acgt1", k=length)), *repeated]
    start_s = time.monotonic()
    tokenizer = train_tokenizer(kind, [*TEXTS, *(f"{long} end." for long in longs)], 600, tmp_path / "t")
    assert time.monotonic() - start_s < 60
    assert "words of over 1000 characters were cut for the training" in caplog.text
    assert max(map(len, tokenizer.backend.get_vocab())) <= 1000 + len("</w>")


def test_cut_words_are_those_over_the_limit() -> None:
    words = ["a" * 1000, "a" * 999, "b" * 2500, "word " * 500, "好" * 1500, "12" * 600, " " * 3000 + "x"]
    cut = list(cut_long_words(words))
    assert [len(text) - len(word) for word, text in zip(words, cut, strict=True)] == [1, 0, 2, 0, 1, 1, -2000]
    assert cut[2].split("\n") == ["b" * 1000, "b" * 1000, "b" * 500]


def test_words_are_counted_as_python_counts_them() -> None:
    expected = Counter(word for text in TEXTS for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text))
    assert count_words(TEXTS, pre_tokenizers.BertPreTokenizer()) == dict(sorted(expected.items()))
