"""Files of static vectors read as gensim reads them, and damaged lines."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.apps.downstream.embed import split_texts
from ctxlm_ds.apps.downstream.features.sources import StaticSource, read_static, split_words
from ctxlm_ds.errors import DataError

GLOVE = "the 0.25 -1.5 3e-2\nTür 1 2 3\n. 4 5 6\n"
SENTENCES = [["the", "film", "was", "good"], ["the", "Film", "was", "bad", "."]] * 20


def look_up(static: StaticSource, *words: str) -> np.ndarray:
    return next(static.vectors([words]))[0]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_files_are_read_as_gensim_reads_them(tmp_path: Path) -> None:
    from gensim.models import KeyedVectors, Word2Vec

    trained = Word2Vec(SENTENCES, vector_size=8, min_count=1, epochs=1, workers=1).wv
    trained.save_word2vec_format(str(tmp_path / "vectors.txt"))
    trained.save_word2vec_format(str(tmp_path / "vectors.bin"), binary=True)
    (tmp_path / "vectors.txt.gz").write_bytes(gzip.compress((tmp_path / "vectors.txt").read_bytes()))
    (tmp_path / "vectors.bin.gz").write_bytes(gzip.compress((tmp_path / "vectors.bin").read_bytes()))
    (tmp_path / "vectors.bin.xz").write_bytes(lzma.compress((tmp_path / "vectors.bin").read_bytes()))
    for name in ("vectors.txt", "vectors.bin", "vectors.txt.gz", "vectors.bin.gz", "vectors.bin.xz"):
        found = read_static(tmp_path / name)
        assert list(found.rows) == trained.index_to_key and np.array_equal(found.table, trained.vectors)
        kept = read_static(tmp_path / name, {"the", "bad"})
        assert set(kept.rows) == {"the", "bad"} and np.array_equal(look_up(kept, "bad")[0], trained["bad"])
    path = write(tmp_path / "glove.txt", GLOVE)
    theirs = KeyedVectors.load_word2vec_format(str(path), binary=False, no_header=True)
    assert np.array_equal(look_up(read_static(path), "the", "Tür", "."), theirs.vectors)


def test_words_have_spaces(tmp_path: Path) -> None:
    path = write(tmp_path / "glove.txt", "the 1 2 3\n. . . 4 5 6\nat name@domain.com 7 8 9\n. 0 0 1\n")
    found = read_static(path)
    assert list(found.rows) == ["the", ". . .", "at name@domain.com", "."]
    assert found.table[1:3].tolist() == [[4, 5, 6], [7, 8, 9]]


def test_words_are_looked_up_as_they_are_then_in_lower_case(tmp_path: Path) -> None:
    static = read_static(write(tmp_path / "glove.txt", GLOVE))
    assert look_up(static, "The", "tür", "THE").tolist() == [[0.25, -1.5, np.float32(3e-2)], [0, 0, 0]] + [
        static.table[0].tolist()
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1 2 3\nb 1 2\n", r"bad\.txt:2: 2 numbers after the word, the lines before have 3; cut off"),
        ("a 1 2 3\nb 1 2 3 4\n", r"bad\.txt:2: 4 numbers after the word, the lines before have 3; .*two lines in one"),
        ("2 3\na 1 2 3\nb 1 x 3\n", r'bad\.txt:3: a line is a word and 3 numbers; what follows "b" is not'),
        ("a 1 nan 3\n", r'bad\.txt:1: a number of "a" is not finite'),
        ("", r"bad\.txt: the file is empty"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_static(write(tmp_path / "bad.txt", text))


def test_files_of_another_form_are_refused(tmp_path: Path) -> None:
    for name in ("bad.bin", "bad.bin.gz", "bad.bin.xz"):
        (tmp_path / name).write_bytes(b"no vectors at all")
        with pytest.raises(DataError, match="no binary file of word2vec"):
            read_static(tmp_path / name)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe 1 2 3\n")
    with pytest.raises(DataError, match=r"bad\.txt:1: the word is no UTF-8"):
        read_static(tmp_path / "bad.txt")


def test_words_of_texts() -> None:
    assert split_words("It's good (very).") == ["It", "'", "s", "good", "(", "very", ")", "."]
    assert list(split_texts(["It was. We saw!\n\nE"], False, False)) == [["It", "was", "."], ["We", "saw", "!"], ["E"]]
    assert list(split_texts(["A b. C d!\n\nE"], True, True)) == [["A", "b.", "C", "d!"], ["E"]]
