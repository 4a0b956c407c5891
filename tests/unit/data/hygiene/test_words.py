"""Word hashes and n-grams against a plain regular expression and plain tuples."""

from __future__ import annotations

import random
import re
import unicodedata

import numpy as np
import pytest

from ctxlm_ds.data.hygiene.words import ngram_hashes, word_hashes
from tests.text import make_documents

_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
TEXTS = [
    "The quick, brown fox: it's 3.5 km away!",
    "Größe ÜBER straße — naïve café",
    "Привет, мир! Ещё раз.",
    "東京は日本の首都です。Tokyo 2020",
    "ประเทศไทย และ ลาว",
    "नमस्ते दुनिया، مرحبا بالعالم",
    "",
    " \n\t ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠀀𠀁 emoji 😀 end",
]


def _plain_words(text: str) -> list[str]:
    """Letters, digits and marks together; a character of a script without spaces alone."""
    words: list[str] = []
    for run in re.split(rf"([{_UNSPACED}\U00020000-\U0003347f])", unicodedata.normalize("NFC", text).lower()):
        word = ""
        for character in run:
            if character.isalnum() or unicodedata.category(character)[0] == "M":
                word += character
            else:
                words += [word] if word else []
                word = ""
        words += [word] if word else []
    return words


@pytest.mark.parametrize("text", TEXTS)
def test_words_are_those_of_plain_python(text: str) -> None:
    hashes, lengths = word_hashes(text)
    words = _plain_words(text)
    assert lengths.tolist() == [len(word) for word in words]
    assert len(hashes) == len(words)


def test_equal_words_have_equal_hashes_and_others_have_not() -> None:
    texts = make_documents(60, seed=3)
    words = [word for text in texts for word in _plain_words(text)]
    hashes = np.concatenate([word_hashes(text)[0] for text in texts])
    by_word = dict(zip(words, hashes.tolist(), strict=True))
    assert [by_word[word] for word in words] == hashes.tolist()
    assert len(set(by_word.values())) == len(by_word)


def test_case_punctuation_and_composition_do_not_count() -> None:
    assert word_hashes("Caf\u00e9, (SO) good...")[0].tolist() == word_hashes("cafe\u0301 so -- GOOD")[0].tolist()


@pytest.mark.parametrize("size", [1, 2, 5, 13])
def test_ngrams_are_equal_where_the_words_are(size: int) -> None:
    rng = random.Random(size)
    words = [rng.choice("abc") for _ in range(400)]
    grams = ngram_hashes(word_hashes(" ".join(words))[0], size)
    tuples = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    assert len(grams) == len(tuples)
    assert len(set(grams.tolist())) == len(set(tuples)) == len(set(zip(grams.tolist(), tuples, strict=True)))


def test_a_text_shorter_than_the_ngram_has_none() -> None:
    assert len(ngram_hashes(word_hashes("one two")[0], 3)) == 0
