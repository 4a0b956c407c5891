"""The work of a preprocessing worker: parse a chunk of records, split it into sentences, tokenize them."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.dataset.reader import token_dtype
from ctxlm_ds.data.preprocess.config import PreprocessConfig
from ctxlm_ds.data.preprocess.sentences import split_sentences
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.types import BadRecord, Chunk, Position, SpannedDocument, Spans
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer

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
    """Return the fastest exact function from texts to flat ids for a tokenizer, those of `Tokenizer.encode_batch`.

    BERT's WordPiece and byte-level BPE tokenize the pieces of a text apart from each other, and a space always divides
    two pieces: the text is cut at its spaces and each word encoded once. Every other tokenizer (a normalizer that sees
    across spaces, added tokens with spaces in them) goes through the library, and so does a text with the name of a
    special token.
    """
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


class EncodedDocuments(NamedTuple):
    """The documents of a chunk under one key."""

    tokens: NDArray[np.int32] | NDArray[np.uint16]
    """[tokens] flat."""
    lengths: NDArray[np.int64]
    """[sequences] tokens of each."""
    sizes: NDArray[np.int64]
    """[documents] sequences of each."""
    continues_span: NDArray[np.uint8] | None = None
    """[tokens] as in the dataset's .spans; None if no spans are given."""


@dataclass(slots=True)
class EncodedChunk:
    """The result of a worker."""

    position: Position
    bytes_read: int
    keys: list[EncodedDocuments] = field(default_factory=list)
    records: int = 0
    characters: int = 0
    unknown: list[int] = field(default_factory=list)
    """Unknown tokens under each key."""
    words: list[int] = field(default_factory=list)
    """White-space words of the texts under each key."""
    empty_documents: int = 0
    bad_records: list[BadRecord] = field(default_factory=list)


class ChunkEncoder:
    """Encoder of one chunk at a time; a worker process makes one."""

    def __init__(self, tokenizer_path: Path, config: PreprocessConfig) -> None:
        tokenizer = load_tokenizer(tokenizer_path, config.split_special_tokens or None)
        self.config = config
        self._tokenizer = tokenizer
        self._encode_flat = flat_encoder(tokenizer)
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._begin_id = tokenizer.cls_id if config.prepend_bos else None
        self._end_id = tokenizer.eod_id if config.append_eod else None
        # GPT has one token for unknown text and the end of a document; its byte-level text is never unknown.
        self._unknown_id = tokenizer.unk_id if tokenizer.unk_id != tokenizer.eod_id else -1
        self._sentence_prefix = encoded_prefix(config, tokenizer)

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        documents: list[dict[str, str]] = []
        result = EncodedChunk(chunk.position, chunk.bytes_read)
        for document in parse_chunk(chunk, self.config.json_keys, self.config.spans_key):
            if isinstance(document, BadRecord):
                result.bad_records.append(document)
            else:
                documents.append(document)
                result.characters += sum(map(len, document.values()))
        result.records = len(documents) + len(result.bad_records)
        spans = [document.spans for document in documents if isinstance(document, SpannedDocument)]
        keys = self.config.json_keys
        encoded = [self.encode([document[key] for document in documents], spans) for key in keys]
        words = np.array([[len(document[key].split()) for document in documents] for key in keys], dtype=np.int64)
        if self.config.join_keys:
            encoded, words = [joined(encoded)], words.sum(axis=0, keepdims=True)
        result.words = [int(own[key.sizes > 0].sum()) for own, key in zip(words, encoded, strict=True)]
        # A document is left out if it is empty under every key. Otherwise the datasets of all keys keep it, since
        # Megatron pairs titles and texts by number.
        kept = np.any([key.sizes > 0 for key in encoded], axis=0)
        result.keys = [key._replace(sizes=key.sizes[kept]) for key in encoded]
        result.unknown = [int(np.count_nonzero(key.tokens == self._unknown_id)) for key in encoded]
        result.empty_documents = int(kept.size - np.count_nonzero(kept))
        return result

    def encode(self, texts: Sequence[str], spans: Sequence[Spans] = ()) -> EncodedDocuments:
        """Encode all texts; one without any token has no sequences."""
        split = [self._split(text) for text in texts]
        flags = None
        if self.config.spans_key:
            tokens, lengths, flags = encode_spanned(self._tokenizer, texts, split, spans, self._sentence_prefix)
        else:
            tokens, lengths = self._encode_flat([sequence for sequences in split for sequence in sequences])
        filled = lengths > 0
        owners = np.repeat(np.arange(len(texts)), list(map(len, split)))[filled]
        lengths, sizes = lengths[filled], np.bincount(owners, minlength=len(texts))
        for token_id, is_end in ((self._end_id, True), (self._begin_id, False)):
            if token_id is not None and lengths.size:
                sequences = (np.cumsum(sizes) - (1 if is_end else sizes))[sizes > 0]
                places = (np.cumsum(lengths) - (0 if is_end else lengths))[sequences]
                tokens = np.insert(tokens, places, token_id)
                flags = None if flags is None else np.insert(flags, places, 0)
                lengths[sequences] += 1
        return EncodedDocuments(tokens.astype(self._dtype), lengths, sizes, flags)

    def _split(self, text: str) -> list[str]:
        if not text or text.isspace():
            return []
        if not self.config.split_sentences:
            return [text]
        sentences = split_sentences(text, self.config.keep_newlines)
        return sentences[:1] + [self._sentence_prefix + sentence for sentence in sentences[1:]]


def joined(keys: Sequence[EncodedDocuments]) -> EncodedDocuments:
    """Return documents that have the text of every key as a sequence; one without a text of each is empty."""
    filled = np.stack([key.sizes > 0 for key in keys], axis=1)
    lengths = np.zeros(filled.shape, dtype=np.int64)
    for number, key in enumerate(keys):
        lengths[filled[:, number], number] = key.lengths
    complete = np.logical_and.reduce(filled, axis=1)
    places = np.arange(filled.size).reshape(filled.shape)
    owners = np.concatenate([np.repeat(places[:, number], lengths[:, number]) for number in range(len(keys))])
    order = np.argsort(owners, kind="stable")
    order = order[complete[owners[order] // len(keys)]]
    tokens = np.concatenate([key.tokens for key in keys])[order]
    return EncodedDocuments(tokens, lengths[complete].ravel(), np.where(complete, len(keys), 0))


def encoded_prefix(config: PreprocessConfig, tokenizer: Tokenizer) -> str:
    """Return the text that is encoded before a sentence that follows another one.

    Byte-level BPE writes the space before a word into its token. Rows that join sentences need it; without
    `leading_space` each sentence is encoded by itself, as fairseq encodes lines.
    """
    return tokenizer.sentence_prefix if config.leading_space or not config.split_sentences else ""


def encode_spanned(
    tokenizer: Tokenizer, texts: Sequence[str], split: Sequence[Sequence[str]], spans: Sequence[Spans], prefix: str
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.uint8]]:
    """Return ids of all sequences [tokens], tokens of each, and [tokens] 1 at a token that continues a given span.

    A token belongs to a span if they share a character. So a span that begins or ends inside a token covers all of it.
    `split` has the sequences of each text, `prefix` stands before each but a text's first and is not in the text.
    """
    sequences = [sequence for of_text in split for sequence in of_text]
    encodings = iter(tokenizer.encode_with_offsets(sequences))
    ids: list[int] = []
    lengths, flags = np.zeros(len(sequences), dtype=np.int64), [np.empty(0, dtype=np.uint8)]
    for text, of_text, given in zip(texts, split, spans, strict=True):
        bounds = np.array(given, dtype=np.int64).reshape(-1, 2)
        position = 0
        for number, sequence in enumerate(of_text):
            core = sequence[len(prefix) * (number > 0) :].strip()
            position = text.index(core, position)
            found, places = next(encodings)
            offsets = np.array(places, dtype=np.int64).reshape(-1, 2) + position - sequence.index(core)
            position += len(core)
            lengths[len(flags) - 1] = len(found)
            ids += found
            flags.append(continuations(offsets, bounds))
    return np.array(ids, dtype=np.int32), lengths, np.concatenate(flags)


def continuations(offsets: NDArray[np.int64], spans: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return [n] 1 for each token that belongs to the span of the token before it.

    Both are [first character, the one after the last]: offsets [n, 2] of the tokens, spans [m, 2] in their order.
    """
    if not len(spans) or not len(offsets):
        return np.zeros(len(offsets), dtype=np.uint8)
    nearest = np.searchsorted(spans[:, 1], offsets[:, 0], side="right")
    begins = np.append(spans[:, 0], np.iinfo(np.int64).max)[nearest]
    owners = np.where(begins < offsets[:, 1], nearest, -1)
    flags = np.zeros(len(offsets), dtype=np.uint8)
    flags[1:] = (owners[1:] >= 0) & (owners[1:] == owners[:-1])
    return flags
