"""Encode many texts to one flat array, with exactly the ids of `Tokenizer.encode_batch`, each word once.

BERT's WordPiece and byte-level BPE tokenize the pieces of a text apart from each other, and a space always divides two
pieces. So the text is cut at its spaces, and a word's ids are looked up. An unknown word is cut once more, at the
punctuation in it; a part still unknown goes through the `tokenizers` library, plain ASCII straight to its model.
Every other tokenizer (a normalizer that sees across spaces, added tokens with spaces in them) goes through the library
text by text, and so does a text with the name of a special token.
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

from ctxlm_ds.tokenizers.base import Tokenizer

FlatIds = tuple[NDArray[np.int32], NDArray[np.int64]]
"""Ids of all texts, [tokens], and the number of each text, [texts]."""

MAX_CACHED_CHARACTERS = 4 << 20
"""Characters of all cached words; a cache that exceeds it is emptied (about 120 MB with its tables)."""
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
    content = tokenizer.content
    normalizer, layers, model = content["normalizer"], content["pre_tokenizer"] or {}, content["model"]
    # A text without the exact name of a special token contains no added token.
    only_exact_names = all(
        token["special"] and not (normalizer and token["normalized"]) for token in content["added_tokens"]
    )
    if only_exact_names:
        by_words = model["type"] == "WordPiece" or bool(model.get("end_of_word_suffix"))
        is_bert = by_words and (normalizer is None or normalizer["type"] == "BertNormalizer")
        if is_bert and layers.get("type") == "BertPreTokenizer":
            return BertWords(tokenizer, content)
        is_byte_level = normalizer is None and model["type"] == "BPE" and layers.get("type") == "ByteLevel"
        if is_byte_level and layers.get("use_regex", True):
            return ByteLevelWords(tokenizer, content)
    return lambda texts: _flatten(tokenizer.encode_batch(texts))


def _flatten(ids: Sequence[Sequence[int]]) -> FlatIds:
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    return np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=int(lengths.sum())), lengths


class _Words(dict[str, bytes]):
    """Ids (int32 bytes) by word, encoded with the text before it at the first access."""

    def __init__(self, encode: Callable[[str], bytes], prefix: str) -> None:
        super().__init__()
        self._encode, self._prefix = encode, prefix

    def __missing__(self, word: str) -> bytes:
        ids = self[word] = self._encode(self._prefix + word)
        return ids


class _WordCache(ABC):
    """Base class: looks words up and empties the cache if they are too many."""

    def __init__(
        self, tokenizer: Tokenizer, content: dict[str, Any], parts_of: re.Pattern[str], prefixes: Sequence[str]
    ) -> None:
        """Create the tables, one for each of the texts before their words.

        `content` is the tokenizer's tokenizer.json; `parts_of` cuts a word into parts that are tokenized independently.
        """
        from tokenizers import Tokenizer as Backend

        layers = content["pre_tokenizer"]
        if layers.get("add_prefix_space"):
            layers = layers | {"add_prefix_space": False}  # the words bring their spaces
        self._backend = Backend.from_str(json.dumps(content | {"pre_tokenizer": layers, "post_processor": None}))
        self._backend.encode_special_tokens = True
        self._model = self._backend.model
        self._tokenizer = tokenizer
        self._parts_of = parts_of
        self._parts: dict[str, bytes] = {}
        self._tables = tuple(_Words(self._encode, prefix) for prefix in prefixes)
        self._num_characters = 0
        """Characters of all cached words."""

    @abstractmethod
    def _look_up(self, text: str) -> bytes:
        """Return the ids of a text."""

    @abstractmethod
    def _to_token(self, part: str) -> str | None:
        """Return the model's own form of a part if that is simple, else None."""

    def __call__(self, texts: Sequence[str]) -> FlatIds:
        has_name = self._tokenizer.special_names.search
        encode = self._tokenizer.encode_batch
        encoded = [array("i", encode([text])[0]).tobytes() if has_name(text) else self._look_up(text) for text in texts]
        if self._num_characters > MAX_CACHED_CHARACTERS:
            self._num_characters = 0
            for table in (self._parts, *self._tables):
                table.clear()
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)) // np.dtype(np.int32).itemsize
        return np.frombuffer(b"".join(encoded), dtype=np.int32), lengths

    def _encode(self, word: str) -> bytes:
        self._num_characters += len(word)
        return b"".join(map(self._encode_part, filter(None, self._parts_of.split(word))))

    def _encode_part(self, part: str) -> bytes:
        ids = self._parts.get(part)
        if ids is None:
            if (token := self._to_token(part)) is not None:
                found = [piece.id for piece in self._model.tokenize(token)]
            else:
                found = self._backend.encode_batch_fast([part], add_special_tokens=False)[0].ids
            ids = self._parts[part] = array("i", found).tobytes()
        return ids


class BertWords(_WordCache):
    """Encoder for BertNormalizer and BertPreTokenizer: every space separates words, and has no token."""

    def __init__(self, tokenizer: Tokenizer, content: dict[str, Any]) -> None:
        normalizer = content["normalizer"] or {}
        self._is_lowercase = bool(normalizer.get("lowercase"))
        parts_of = _BERT_IDEOGRAPH_PARTS if normalizer.get("handle_chinese_chars") else _BERT_PARTS
        super().__init__(tokenizer, content, parts_of, [""])

    def _look_up(self, text: str) -> bytes:
        return b"".join(map(self._tables[0].__getitem__, text.split(" ")))

    def _to_token(self, part: str) -> str | None:
        if not (part.isascii() and part.isalnum()):
            return None
        return part.lower() if self._is_lowercase else part


class ByteLevelWords(_WordCache):
    """Encoder for ByteLevel with GPT-2's pattern: a space after text begins a piece, often with the next word."""

    def __init__(self, tokenizer: Tokenizer, content: dict[str, Any]) -> None:
        self._add_prefix_space = bool(content["pre_tokenizer"].get("add_prefix_space"))
        super().__init__(tokenizer, content, _BYTE_LEVEL_PARTS, ["", " "])

    def _look_up(self, text: str) -> bytes:
        whole, spaced = self._tables
        if self._add_prefix_space and text and not text.startswith(" "):
            text = " " + text
        if "  " in text or _SPACE_BEHIND_SPACE.search(text):
            return b"".join(map(whole.__getitem__, _AT_SPACE_BEHIND_TEXT.split(text)))
        first, *others = text.split(" ")
        return whole[first] + b"".join(map(spaced.__getitem__, others))

    def _to_token(self, part: str) -> str | None:
        word = part[1:] if part.startswith(" ") else part
        if word.isascii() and (word.isalpha() or word.isdigit()):
            return word if word is part else "\u0120" + word  # how byte-level BPE writes a space
        return None
