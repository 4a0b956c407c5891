"""Encode many texts to one flat array of ids. Text repeats its words, so each word is tokenized once.

In: a tokenizer, texts. Out: exactly the ids of `Tokenizer.encode_batch`, flat, with the length of each text.

BERT's WordPiece and byte-level BPE tokenize the pieces of a text apart from each other, and a space always divides two
pieces. So the text is cut at its spaces, and a word's ids are looked up. An unknown word is cut once more, at the
punctuation in it; a part still unknown goes through the `tokenizers` library, plain ASCII straight to its model.
Every other tokenizer (a normalizer that sees across spaces, added tokens with spaces in them) goes through the library
text by text, and so does a text with the name of a special token. Not here: which texts (data/preprocess/job.py).
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.tokenizers.base import FastTokenizer, Tokenizer, special_names

FlatIds = tuple[NDArray[np.int32], NDArray[np.int64]]
"""Ids of all texts, [tokens], and the number of each text, [texts]."""

MAX_CACHED_CHARACTERS = 4 << 20
"""Characters of all cached words; a cache that exceeds it is emptied (about 120 MB with its tables)."""
_ID_BYTES = 4

_PUNCTUATION = r"!-/:-@\[-`{-~"
# BERT isolates each ASCII punctuation mark (and each ideograph, if its normalizer asks for it).
_BERT_PARTS = re.compile(f"([{_PUNCTUATION}])")
_BERT_IDEOGRAPH_PARTS = re.compile(f"([{_PUNCTUATION}\u4e00-\u9fff])")
# GPT-2's pattern never runs from text into white space, from a letter into punctuation, or from punctuation into a
# letter, except that an apostrophe and the letters behind it may be one piece.
_BYTE_LEVEL_PARTS = re.compile(
    rf"(?<=\S)(?=[\n\r\t ])|(?<=[A-Za-z])(?=[{_PUNCTUATION}])|(?<=[!-&(-/:-@\[-`{{-~])(?=[A-Za-z])"
)
_AT_SPACE_BEHIND_TEXT = re.compile(r"(?<=\S)(?= )")
_SPACE_BEHIND_SPACE = re.compile(r"\s ")


def flat_encoder(tokenizer: Tokenizer) -> Callable[[Sequence[str]], FlatIds]:
    """Return the fastest exact function from texts to flat ids for a tokenizer."""
    backend = getattr(tokenizer, "backend", None)
    if backend is None or not isinstance(tokenizer, FastTokenizer):
        return lambda texts: flatten(tokenizer.encode_batch(texts))
    content = json.loads(backend.to_str())
    if not _finds_only_exact_names(content):
        return lambda texts: flatten(tokenizer.encode_batch(texts))
    normalizer, layers, model = content["normalizer"], content["pre_tokenizer"] or {}, content["model"]
    words = model["type"] == "WordPiece" or bool(model.get("end_of_word_suffix") and not model.get("dropout"))
    bert = (normalizer or {}).get("type", "BertNormalizer") == "BertNormalizer" and words
    if bert and layers.get("type") == "BertPreTokenizer":
        return BertWords(content, tokenizer)
    byte_level = normalizer is None and model["type"] == "BPE" and not model.get("dropout")
    if byte_level and layers.get("type") == "ByteLevel" and layers.get("use_regex", True):
        return ByteLevelWords(content, tokenizer)
    return lambda texts: flatten(tokenizer.encode_batch(texts))


def flatten(ids: Sequence[Sequence[int]]) -> FlatIds:
    """Return lists of ids as one flat array and their lengths."""
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    tokens = np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=int(lengths.sum()))
    return tokens, lengths


def _finds_only_exact_names(content: dict[str, Any]) -> bool:
    """Return whether a text without the exact name of a special token contains no added token."""
    exact = content["normalizer"] is None
    return all(token["special"] and (exact or not token["normalized"]) for token in content["added_tokens"])


class _Encoder:
    """Ids (int32 bytes) of a piece of text, from its cached parts."""

    def __init__(
        self, content: dict[str, Any], parts_of: re.Pattern[str], to_token: Callable[[str], str | None]
    ) -> None:
        """`to_token` returns the model's own form of a part if that is simple, else None."""
        from tokenizers import Tokenizer as Backend

        layers = content["pre_tokenizer"]
        if layers.get("add_prefix_space"):
            layers = layers | {"add_prefix_space": False}  # the words bring their spaces
        self._backend = Backend.from_str(json.dumps(content | {"pre_tokenizer": layers, "post_processor": None}))
        self._backend.encode_special_tokens = True
        self._model = self._backend.model
        self._parts_of = parts_of
        self._to_token = to_token
        self._parts: dict[str, bytes] = {"": b""}
        self.num_characters = 0
        """Characters of all cached words."""

    def __call__(self, text: str) -> bytes:
        self.num_characters += len(text)
        parts = self._parts_of.split(text)
        return self._part(text) if len(parts) == 1 else b"".join(map(self._part, parts))

    def _part(self, part: str) -> bytes:
        ids = self._parts.get(part)
        if ids is None:
            token = self._to_token(part)
            if token is None:
                (encoding,) = self._backend.encode_batch_fast([part], add_special_tokens=False)
                ids = array("i", encoding.ids).tobytes()
            else:
                ids = array("i", [piece.id for piece in self._model.tokenize(token)]).tobytes()
            self._parts[part] = ids
        return ids

    def forget(self) -> None:
        self._parts.clear()
        self._parts[""] = b""
        self.num_characters = 0


class _Words(dict[str, bytes]):
    """Ids by word, encoded at the first access."""

    def __init__(self, encoder: _Encoder, prefix: str) -> None:
        super().__init__()
        self._encoder = encoder
        self._prefix = prefix
        """Text before each of these words."""

    def __missing__(self, word: str) -> bytes:
        ids = self[word] = self._encoder(self._prefix + word)
        return ids


class _CachedEncoder(ABC):
    """Base class: looks words up and empties the cache if they are too many."""

    def __init__(self, tokenizer: FastTokenizer, encoder: _Encoder, *tables: _Words) -> None:
        self._tokenizer = tokenizer
        self._names = special_names(tokenizer.backend)
        self._encoder = encoder
        self._tables = tables

    @abstractmethod
    def _look_up(self, text: str) -> bytes:
        """Return the ids of a text."""

    def __call__(self, texts: Sequence[str]) -> FlatIds:
        encoded = [self._with_names(text) if self._names.search(text) else self._look_up(text) for text in texts]
        if self._encoder.num_characters > MAX_CACHED_CHARACTERS:
            self._encoder.forget()
            for table in self._tables:
                table.clear()
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)) // _ID_BYTES
        return np.frombuffer(b"".join(encoded), dtype=np.int32), lengths

    def _with_names(self, text: str) -> bytes:
        (ids,) = self._tokenizer.encode_batch([text])
        return array("i", ids).tobytes()


class BertWords(_CachedEncoder):
    """Encoder for BertNormalizer and BertPreTokenizer: every space separates words, and has no token."""

    def __init__(self, content: dict[str, Any], tokenizer: FastTokenizer) -> None:
        normalizer = content["normalizer"] or {}
        is_lowercase = bool(normalizer.get("lowercase"))

        def to_token(part: str) -> str | None:
            if part.isascii() and part.isalnum():
                return part.lower() if is_lowercase else part
            return None

        encoder = _Encoder(
            content, _BERT_IDEOGRAPH_PARTS if normalizer.get("handle_chinese_chars") else _BERT_PARTS, to_token
        )
        self._words = _Words(encoder, "")
        super().__init__(tokenizer, encoder, self._words)

    def _look_up(self, text: str) -> bytes:
        return b"".join(map(self._words.__getitem__, text.split(" ")))


class ByteLevelWords(_CachedEncoder):
    """Encoder for ByteLevel with GPT-2's pattern: a space after text begins a piece, often with the next word."""

    def __init__(self, content: dict[str, Any], tokenizer: FastTokenizer) -> None:
        self._add_prefix_space = bool(content["pre_tokenizer"].get("add_prefix_space"))
        encoder = _Encoder(content, _BYTE_LEVEL_PARTS, _byte_level_token)
        self._spaced, self._whole = _Words(encoder, " "), _Words(encoder, "")
        super().__init__(tokenizer, encoder, self._spaced, self._whole)

    def _look_up(self, text: str) -> bytes:
        if self._add_prefix_space and text and not text.startswith(" "):
            text = " " + text
        if "  " in text or _SPACE_BEHIND_SPACE.search(text):
            return b"".join(map(self._whole.__getitem__, _AT_SPACE_BEHIND_TEXT.split(text)))
        first, *spaced = text.split(" ")
        return self._whole[first] + b"".join(map(self._spaced.__getitem__, spaced))


def _byte_level_token(part: str) -> str | None:
    word = part[1:] if part.startswith(" ") else part
    if word.isascii() and (word.isalpha() or word.isdigit()):
        return word if word is part else "\u0120" + word  # how byte-level BPE writes a space
    return None
