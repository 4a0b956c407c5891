"""Samples of languages by their share of the text."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from ctxlm_ds.apps.text.tokenizers import LanguageSample

LANGUAGES = {"large": 900, "middle": 90, "small": 9}


def language_documents() -> list[tuple[str, str]]:
    """Documents of three languages in turn, of 20 to 60 bytes."""
    return [
        (language, f"{language} {number:05d} " + "é" * (number % 20))
        for number in range(900)
        for language, count in LANGUAGES.items()
        if number < count
    ]


@pytest.mark.parametrize("exponent", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("max_bytes", [None, 20_000])
def test_languages_have_their_share_to_the_power_of_the_exponent(exponent: float, max_bytes: int | None) -> None:
    sample = LanguageSample(language_documents, exponent, max_bytes, seed=3)
    sizes = {name: sum(len(text.encode()) for one, text in language_documents() if one == name) for name in LANGUAGES}
    assert sample.bytes_by_language == sizes
    weights = {name: (size / sum(sizes.values())) ** exponent for name, size in sizes.items()}
    found = dict.fromkeys(LANGUAGES, 0)
    for text in sample:
        found[text.split()[0]] += len(text.encode())
    wanted = sum(sizes.values()) if max_bytes is None else max_bytes
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        assert sample.shares[name] == pytest.approx(share)
        # Each text comes a whole number of times; which of two is a draw.
        assert abs(found[name] - share * wanted) <= 4 * 60 * math.sqrt(LANGUAGES[name]) / 2
    assert len(list(sample.lines())) == 3


def test_texts_come_equally_often_and_the_seed_decides_which_once_more() -> None:
    first, again, other = (list(LanguageSample(language_documents, 0.3, None, seed)) for seed in (1, 1, 2))
    assert first == again != other
    counts = Counter(text for text in first if text.startswith("small"))
    assert len(counts) == 9 and max(counts.values()) - min(counts.values()) <= 1
    assert list(LanguageSample(language_documents, 1.0)) == [text for _, text in language_documents()]
