"""Gopher's repetition measures against the definitions written out in plain Python."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ctxlm_ds.data.hygiene.quality import repeated_ngram_characters, repetition_reason, top_ngram_characters
from ctxlm_ds.data.hygiene.words import ngram_hashes, word_hashes
from tests.text import make_documents


def _plain_top(words: list[str], size: int) -> int:
    grams = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    counts = Counter(grams)
    most = max(counts.values(), default=0)
    if most < 2:
        return 0
    return max(most * sum(map(len, gram)) for gram, count in counts.items() if count == most)


def _plain_repeated(words: list[str], size: int) -> int:
    seen: set[tuple[str, ...]] = set()
    characters, start = 0, 0
    while start <= len(words) - size:
        gram = tuple(words[start : start + size])
        if gram in seen:
            characters += sum(map(len, gram))
            start += size
        else:
            seen.add(gram)
            start += 1
    return characters


@pytest.mark.parametrize("seed", range(6))
def test_measures_are_those_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    vocabulary = ["a", "of", "tree", "river", "mountain"][: 2 + seed % 4]
    words = [rng.choice(vocabulary) for _ in range(rng.choice((3, 40, 300)))]
    hashes, lengths = word_hashes(" ".join(words))
    for size in range(2, 11):
        grams = ngram_hashes(hashes, size)
        assert top_ngram_characters(grams, lengths, size) == _plain_top(words, size)
        assert repeated_ngram_characters(grams, lengths, size) == _plain_repeated(words, size)


def test_ordinary_text_passes() -> None:
    long_texts = [text for text in make_documents(60, seed=1, max_sentences=40) if len(text.split()) > 200]
    assert len(long_texts) > 20
    assert [repetition_reason(text) for text in long_texts[:5]] == [None] * 5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\n".join(["the same line", "another line here", "the same line"] * 4), "over 30% of the lines"),
        ("One long paragraph about a river and a mountain.\n\n" * 3, "over 30% of the lines"),
        ("\n".join([f"{i}" for i in range(40)] + ["a long line that is here twice " * 5] * 2), "repeated lines hold"),
        ("spam eggs " * 60, "one 2-gram holds over 20%"),
        (" ".join(make_documents(1, seed=5, max_sentences=9) * 2).replace("\n", " "), "repeated 5-grams hold over"),
        ("", None),
        ("...", None),
    ],
)
def test_repetition_is_named(text: str, reason: str | None) -> None:
    found = repetition_reason(text)
    assert found is None if reason is None else found is not None and reason in found
