"""Static vectors of words: files of GloVe and of word2vec (text and binary)."""

from __future__ import annotations

import io
import lzma
import sys
import zlib
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.apps.downstream.examples import OPENERS
from ctxlm_ds.errors import DataError
from ctxlm_ds.installed import check_extra
from ctxlm_ds.recipe.problems import show_value

BINARY = ".bin"
DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error)
"""What reading a damaged file raises, plain or compressed."""


@dataclass(frozen=True)
class StaticVectors:
    """A table of vectors."""

    rows: dict[str, int]
    """Row of each word."""
    table: NDArray[np.float32]
    """[words, width]."""

    @property
    def width(self) -> int:
        """Width of the vectors."""
        return int(self.table.shape[1])

    @classmethod
    def read(cls, path: Path, vocabulary: Container[str] | None = None) -> StaticVectors:
        """Read a file: GloVe's text, word2vec's text (a first line with numbers of words and columns), or `.bin`.

        It may also be .xz or .gz; only words of the vocabulary are kept, if there is one.

        Raises:
            DataError: a line is damaged; names file, line and remedy.
        """
        plain = path.with_suffix("") if path.suffix in OPENERS else path
        return _read_binary(path, vocabulary) if plain.suffix == BINARY else _read_text(path, vocabulary)

    def look_up(self, words: Sequence[str]) -> NDArray[np.float32]:
        """Return [words, width]: a word's vector, that of the word in lower case, or 0."""
        found = np.zeros((len(words), self.width), dtype=np.float32)
        for place, word in enumerate(words):
            row = self.row_of(word)
            if row is not None:
                found[place] = self.table[row]
        return found

    def row_of(self, word: str) -> int | None:
        """Return the row of a word, or of the word in lower case."""
        row = self.rows.get(word)
        return self.rows.get(word.lower()) if row is None else row


def _read_text(path: Path, vocabulary: Container[str] | None) -> StaticVectors:
    rows: dict[str, int] = {}
    vectors: list[NDArray[np.float32]] = []
    width = 0
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            for line, content in enumerate(io.BufferedReader(file), 1):
                content = content.rstrip()
                word, _, numbers = content.partition(b" ")
                if line == 1 and word.isdigit() and numbers.isdigit() and int(numbers) > 0:
                    width = int(numbers)
                    continue
                count = numbers.count(b" ") + 1 if numbers else 0
                width = width or count
                if count > width:
                    word, numbers, count = _with_spaces(content, width)
                text = _decoded(word, f"{path}:{line}")
                if count != width:
                    raise DataError(f"{path}:{line}: {count} numbers after the word, the lines before have {width}; "
                                    "cut off, or two lines in one? Copy the file again or remove the line")  # fmt: skip
                if text in rows or not (vocabulary is None or text in vocabulary):
                    continue
                rows[text] = len(vectors)
                vectors.append(_numbers(numbers, width, f"{path}:{line}", text))
    except DAMAGED as error:
        raise DataError(f"{path}: damaged or cut off ({error})") from None
    if not width:
        raise DataError(f"{path}: the file is empty")
    return StaticVectors(rows, np.array(vectors, dtype=np.float32).reshape(-1, width))


def _decoded(word: bytes, origin: str) -> str:
    try:
        return word.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{origin}: the word is no UTF-8; convert the file, and name binary files {BINARY}") from None


def _with_spaces(content: bytes, width: int) -> tuple[bytes, bytes, int]:
    """Return word, numbers and how many of a line whose word has spaces (GloVe's 840B).

    If the word ends with a number, these are too many.
    """
    word, *numbers = content.rsplit(b" ", width)
    parts = word.split(b" ")
    try:
        float(parts[-1])
    except ValueError:
        return word, b" ".join(numbers), width
    return parts[0], content.partition(b" ")[2], len(parts) - 1 + width


def _numbers(text: bytes, width: int, origin: str, word: str) -> NDArray[np.float32]:
    try:
        found = np.array(text.split(b" "), dtype=np.float32)
    except ValueError:
        raise DataError(f"{origin}: a line is a word and {width} numbers; what follows {show_value(word)} is not; "
                        "remove the line") from None  # fmt: skip
    if not np.isfinite(found).all():
        raise DataError(f"{origin}: a number of {show_value(word)} is not finite; remove the line")
    return found


def _read_binary(path: Path, vocabulary: Container[str] | None) -> StaticVectors:
    check_extra("downstream", ["gensim"])
    from gensim.models import KeyedVectors

    try:
        found = KeyedVectors.load_word2vec_format(str(path), binary=True)
    except (*DAMAGED, ValueError, MemoryError) as error:
        raise DataError(f"{path}: no binary file of word2vec ({error}); other names than *{BINARY} are text") from None
    kept = [word for word in found.index_to_key if vocabulary is None or word in vocabulary]
    rows = {word: row for row, word in enumerate(kept)}
    return StaticVectors(rows, found.vectors[[found.key_to_index[word] for word in kept]].astype(np.float32))


def split_words(text: str) -> list[str]:
    """Split a text at white space and around punctuation marks, as BERT's and ELMo's first step does."""
    return [sys.intern(word) for word, _ in _splitter().pre_tokenize_str(text)]


@cache
def _splitter() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.BertPreTokenizer()
