"""Samples of a corpus: a function of (seed, document number), uniform, within the limit."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from ctxlm_ds.tokenizers.sampling import KeyedSample, LanguageSample, sampled_texts
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents


def _numbers(num_documents: int, max_bytes: int, seed: int) -> list[int]:
    return [int(text) for text in sampled_texts((f"{number:06}" for number in range(num_documents)), max_bytes, seed)]


def test_a_sample_is_the_same_each_time_and_another_for_another_seed() -> None:
    first = _numbers(2000, 3000, seed=1)
    assert first == _numbers(2000, 3000, seed=1) == sorted(first)
    assert len(first) == len(set(first)) == 300  # ten bytes each as they are written
    assert first != _numbers(2000, 3000, seed=2)


def test_what_is_kept_of_a_beginning_does_not_depend_on_the_limit() -> None:
    """Smaller samples are parts of larger ones, so a vocabulary can be compared over sizes."""
    assert set(_numbers(1000, 1000, seed=3)) < set(_numbers(1000, 4000, seed=3))


def test_every_part_of_the_corpus_has_its_share() -> None:
    tenths = Counter(number // 100 for seed in range(30) for number in _numbers(1000, 2000, seed))
    assert sum(tenths.values()) == 30 * 200
    assert min(tenths.values()) > 500 and max(tenths.values()) < 700  # 600 each, deviation about 22


def test_documents_of_all_sizes_come_back_whole() -> None:
    documents = make_documents(50, seed=1) + ["", "é\x00🙂\n", "x" * 100_000]
    assert list(sampled_texts(documents, 10**9)) == documents
    assert len(list(sampled_texts(["a" * 1000], 10))) == 1
    assert list(sampled_texts([], 10)) == []


def test_a_sample_can_be_read_twice_and_added_to() -> None:
    sample = KeyedSample(10**6)
    sample.add(["en", "one"])
    assert list(sample) == list(sample) == [["en", "one"]]
    sample.add(["de", "zwei"])
    assert list(sample) == [["en", "one"], ["de", "zwei"]]
    assert (sample.num_seen, len(sample)) == (2, 2)


def test_training_on_a_sample_is_training_on_its_texts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = make_documents(300, seed=8)
    sampled = train_tokenizer("wordpiece", texts, 500, tmp_path / "a", max_sample_bytes=60_000, sample_seed=4)
    direct = train_tokenizer("wordpiece", list(sampled_texts(texts, 60_000, 4)), 500, tmp_path / "b")
    whole = train_tokenizer("wordpiece", texts, 500, tmp_path / "c")
    assert sampled.fingerprint == direct.fingerprint != whole.fingerprint
    record = json.loads((tmp_path / "a" / "ctxlm_tokenizer.json").read_text())
    assert (record["max_sample_bytes"], record["sample_seed"]) == (60_000, 4)


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
