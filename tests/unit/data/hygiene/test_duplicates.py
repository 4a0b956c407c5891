"""Fingerprints, held-out n-grams against plain sets, near duplicates against exact Jaccard similarities."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from ctxlm_ds.data.hygiene.duplicates import NearIndex, band_rows, fingerprint, shares_ngram, signatures, write_held_out
from ctxlm_ds.data.hygiene.words import word_hashes
from ctxlm_ds.errors import DataError
from tests.text import make_documents


@pytest.fixture
def file(tmp_path: Path) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile(dir=tmp_path, buffering=0) as file:
        yield file


def _words(text: str) -> np.ndarray:
    return word_hashes(text)[0]


def _jaccard(first: str, second: str, size: int = 5) -> float:
    sides = (first.split(), second.split())
    one, other = ({tuple(words[i : i + size]) for i in range(len(words) - size + 1)} for words in sides)
    return len(one & other) / len(one | other)


def _mutated(words: list[str], changes: int, rng: random.Random) -> str:
    changed = list(words)
    for place in rng.sample(range(len(words)), changes):
        changed[place] = f"changed{rng.randrange(10**9)}"
    return " ".join(changed)


def test_fingerprints_see_words_and_only_words() -> None:
    same = [fingerprint(text, _words(text)) for text in ("Hello, World!", "hello   world", "HELLO\nWORLD...")]
    assert len(set(same)) == 1
    others = [fingerprint(text, _words(text)) for text in ("hello worlds", "world hello", "!!!", "???", "")]
    assert len({*same, *others}) == 6


def test_signatures_estimate_the_similarity_of_the_sets() -> None:
    """Of 512 slots the share that agrees is within four standard deviations (0.088) of the exact Jaccard similarity."""
    texts = make_documents(24, seed=2)
    words = [_words(text) for text in texts]
    matrix = signatures([*words, words[0][::-1].copy()], 1, 512)
    sets = [set(one.tolist()) for one in words]
    for first in range(len(texts)):
        for second in range(first):
            exact = len(sets[first] & sets[second]) / len(sets[first] | sets[second])
            assert abs((matrix[first] == matrix[second]).mean() - exact) < 0.088
    assert (matrix[0] == matrix[-1]).all()


@pytest.mark.parametrize(("threshold", "slots", "rows"), [(0.8, 128, 7), (0.5, 128, 3), (1.0, 64, 64), (0.9, 128, 12)])
def test_bands_find_nineteen_of_twenty_at_the_threshold(threshold: float, slots: int, rows: int) -> None:
    recall = [1 - (1 - threshold**more) ** (slots // more) for more in (rows, rows + 1) if more <= slots]
    assert band_rows(threshold, slots) == rows
    assert recall[0] >= 0.95 and all(less < 0.95 for less in recall[1:])


def _add(index: NearIndex, rows: np.ndarray) -> list[int | None]:
    """Look each signature up; add it if it is new."""
    found = []
    for row in rows:
        found.append(index.find(row))
        if found[-1] is None:
            index.add(row)
    return found


def test_near_duplicates_are_those_of_exact_similarity(file: IO[bytes]) -> None:
    """120 originals and mutations of known similarity."""
    rng = random.Random(7)
    originals = [[f"w{rng.randrange(10**6)}" for _ in range(200)] for _ in range(120)]
    index = NearIndex(file, 0.8)
    assert _add(index, signatures([_words(" ".join(words)) for words in originals])) == [None] * 120
    found = {1: 0, 30: 0}
    for changes in found:
        for number, words in enumerate(originals):
            text = _mutated(words, changes, rng)
            similarity = _jaccard(" ".join(words), text)
            assert (similarity > 0.93) if changes == 1 else (similarity < 0.45)
            original = index.find(signatures([_words(text)])[0])
            found[changes] += original == number
            assert original in (None, number)
    assert found == {1: 120, 30: 0}


def test_the_index_grows_and_remembers_everything(file: IO[bytes]) -> None:
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 1 << 32, (3000, 16), dtype=np.uint32)
    index = NearIndex(file, 0.9, 16)
    assert _add(index, rows) == [None] * 3000
    assert [index.find(row) for row in rows[::7]] == list(range(0, 3000, 7))


def test_a_band_that_everybody_shares_hides_no_duplicate(file: IO[bytes]) -> None:
    """Documents with one common band are no duplicates, and each is still found by its other bands."""
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 1 << 32, (2000, 128), dtype=np.uint32)
    rows[:, :7] = 5
    index = NearIndex(file, 0.8)
    assert _add(index, rows) == [None] * 2000
    assert [index.find(row) for row in rows[-50:]] == list(range(1950, 2000))


def test_held_out_ngrams_are_found_and_no_others(tmp_path: Path) -> None:
    held_out = make_documents(30, seed=11, max_sentences=8)
    lines = [json.dumps({"text": text}) + "\n" for text in [*held_out, "too short"]]
    (tmp_path / "held.jsonl").write_text("".join(lines))
    counts = write_held_out([str(tmp_path / "held.jsonl")], 6, tmp_path / "grams.npy")
    assert (counts["documents"], counts["too_short"] > 0) == (31, True)
    table = np.load(tmp_path / "grams.npy", mmap_mode="r")
    known = {tuple(_words(text)[i : i + 6].tolist()) for text in held_out for i in range(len(_words(text)) - 5)}
    assert counts["ngrams"] == len(known)
    verdicts = []
    for text in [*make_documents(60, seed=12, max_sentences=5), *held_out]:
        words = _words(text)
        expected = any(tuple(words[i : i + 6].tolist()) in known for i in range(len(words) - 5))
        assert shares_ngram(words, 6, table) == expected
        verdicts.append(expected)
    assert 10 < sum(verdicts) < len(verdicts)
    assert shares_ngram(_words("He said: " + held_out[3]), 6, table)


def test_an_empty_held_out_file_finds_nothing(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("")
    counts = write_held_out([str(tmp_path / "held.txt")], 13, tmp_path / "grams.npy")
    assert counts["ngrams"] == 0
    assert not shares_ngram(_words(make_documents(1)[0]), 13, np.load(tmp_path / "grams.npy", mmap_mode="r"))


def test_a_damaged_held_out_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(DataError, match="held-out files must be read completely"):
        write_held_out([str(tmp_path / "held.jsonl")], 13, tmp_path / "grams.npy")
