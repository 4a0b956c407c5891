"""Samples of a corpus: a function of (seed, document number), uniform, within the limit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from ctxlm_ds.tokenizers.train import KeyedSample, sampled_texts, train_tokenizer
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
