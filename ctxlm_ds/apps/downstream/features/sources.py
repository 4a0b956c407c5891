"""Sources of vectors of words: models of transformers, models in a family's own format, files of static vectors."""

from __future__ import annotations

import io
import lzma
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import AutoModel

from ctxlm_ds.apps.downstream.examples import OPENERS
from ctxlm_ds.apps.downstream.kinds.base import check_weights, quiet_transformers
from ctxlm_ds.apps.downstream.kinds.tagging import encode_windows, word_places
from ctxlm_ds.apps.downstream.prepare import check_names, load_tokenizer, longest_input
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.export.base import WordLayers, own_format_in
from ctxlm_ds.installed import check_extra
from ctxlm_ds.recipe.problems import shortened, show_value

Words = Sequence[str]
Vectors = NDArray[np.float32]
Pooling = Literal["first", "mean", "last"]
OF_SUBWORDS: dict[str, slice] = {"first": slice(1), "mean": slice(None), "last": slice(-1, None)}
"""Subwords whose mean is the vector of a word, by pooling."""
BLOCK = 1024
"""Sentences that are sorted by length together."""
BATCH = 32
LONGEST = 512
"""Most tokens of a window."""
BINARY = ".bin"
SPLITTER = BertPreTokenizer()
DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error)
"""What reading a damaged file raises, plain or compressed."""


class FeatureSource(ABC):
    """What gives vectors to the words of a sentence."""

    def __init__(self, name: str, num_layers: int, width: int) -> None:
        self.name = name
        self.num_layers = num_layers
        self.width = width

    def vectors(self, sentences: Iterable[Words]) -> Iterator[Vectors]:
        """Yield [layers, words, width] of each sentence, in order; 0 for a word that the source does not know."""
        left = iter(sentences)
        while block := list(islice(left, BLOCK)):
            yield from self.block(block)

    @abstractmethod
    def block(self, sentences: Sequence[Words]) -> Iterable[Vectors]:
        """Return the vectors of some sentences, which are computed together."""

    def __str__(self) -> str:
        return self.name


def open_source(
    path: Path, pooling: Pooling | None = None, vocabulary: Container[str] | None = None, separate: bool = False,
    split: bool | None = None,
) -> FeatureSource:  # fmt: skip
    """Open a folder in Hugging Face's form or in a family's own format (ELMo), or a file of static vectors.

    `pooling` gives the vector of a word of several subwords (None: the first one's); a source without subwords refuses
    it. Only words of the vocabulary of a file are kept. With `separate` an ELMo has 2L + 1 layers of one direction.
    With `split` the names of special tokens are text. Raises ConfigError, TokenizerError, ExportError or DataError if
    the path holds no source, or a damaged one.
    """
    own = own_format_in(path) if path.is_dir() else None
    if pooling is not None and (own is not None or path.is_file()):
        raise ConfigError(f"--pooling {pooling}: {path} has no subwords; drop the option")
    if own is not None:
        return OwnSource(str(path), own.word_layers(path), separate)
    if separate:
        raise ConfigError(f"--separate-directions: {path} is no ELMo (options.json and weights.hdf5)")
    if path.is_dir():
        return TransformersSource(path, pooling or "first", split=split)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder; give a model's folder or a file of static vectors")
    return read_static(path, vocabulary)


class StaticSource(FeatureSource):
    """One vector for each word: its own, that of the word in lower case, or 0."""

    def __init__(self, name: str, rows: dict[str, int], table: Vectors) -> None:
        super().__init__(name, 1, table.shape[1])
        self.rows, self.table = rows, table
        self.num_words = self.num_unknown = 0
        """Words that were looked up, and those among them without a vector."""

    def row_of(self, word: str) -> int | None:
        """Return the row of a word in the table, or of the word in lower case."""
        return self.rows.get(word, self.rows.get(word.lower()))

    def block(self, sentences: Sequence[Words]) -> Iterator[Vectors]:
        for words in sentences:
            rows = [self.row_of(word) for word in words]
            known = [place for place, row in enumerate(rows) if row is not None]
            found = np.zeros((1, len(words), self.width), dtype=np.float32)
            found[0, known] = self.table[[row for row in rows if row is not None]]
            self.num_words += len(words)
            self.num_unknown += rows.count(None)
            yield found


class OwnSource(FeatureSource):
    """A model that has no class in transformers: ELMo's layers, the context-free one first."""

    def __init__(self, name: str, layers: WordLayers, separate: bool = False) -> None:
        count, width = layers.num_layers, layers.width
        super().__init__(name, *((2 * count - 1, width // 2) if separate else (count, width)))
        self._layers = layers
        self._separate = separate

    def block(self, sentences: Sequence[Words]) -> Iterator[Vectors]:
        found: dict[int, Vectors] = {}
        for batch in _by_length([len(words) for words in sentences]):
            found |= zip(batch, self._layers([sentences[at] for at in batch]), strict=True)
        for at in range(len(sentences)):
            if not self._separate:
                yield found[at]
                continue
            # Layers [L + 1, n, 2p] to [2L + 1, n, p]: x, then forward and backward of each LSTM (Peters 2018).
            halves = np.split(found[at], 2, axis=-1)
            yield np.concatenate([halves[0][:1], np.stack(halves, axis=1)[1:].reshape(-1, *halves[0].shape[1:])])


class TransformersSource(FeatureSource):
    """All hidden states of an encoder, of the encoder of an encoder-decoder, or of a decoder."""

    def __init__(
        self, folder: Path, pooling: Pooling = "first", max_length: int = LONGEST, split: bool | None = None
    ) -> None:
        quiet_transformers()
        self.tokenizer = load_tokenizer(folder, True, split)
        self.tokenizer.padding_side = "right"
        self.max_length = longest_input(folder, self.tokenizer, max_length)
        options = {"dtype": torch.float32, "use_safetensors": True, "local_files_only": True}
        try:
            model, loading = AutoModel.from_pretrained(folder, output_loading_info=True, **options)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: its model cannot be loaded: {str(error).splitlines()[0]}") from None
        check_weights(folder, model, loading["missing_keys"])
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = (model.get_encoder() if model.config.is_encoder_decoder else model).eval().to(self.device)
        self.pooling, self._has_names = pooling, False
        probe = self._hidden({"input_ids": [[0]], "attention_mask": [[1]]})
        super().__init__(str(folder), probe.shape[0], probe.shape[-1])

    def block(self, sentences: Sequence[Words]) -> list[Vectors]:
        texts = [list(words) or [""] for words in sentences]
        named = ((shortened(" ".join(words)), "\0".join(words)) for words in texts)
        self._has_names = self._has_names or check_names(self.tokenizer, named)  # one warning of a long text
        rows, sources = encode_windows(self.tokenizer, texts, self.max_length, self.max_length)
        found = [np.zeros((self.num_layers, len(words), self.width), dtype=np.float32) for words in sentences]
        words_of: list[list[tuple[Vectors, list[int]]]] = [[] for _ in rows]
        for vectors, places in zip(found, word_places(sources, len(sentences)), strict=True):
            for word, (at, positions) in places.items():
                words_of[at].append((vectors[:, word], positions[OF_SUBWORDS[self.pooling]]))
        for batch in _by_length([len(row["input_ids"]) for row in rows]):
            hidden = self._hidden({name: [rows[at][name] for at in batch] for name in rows[0]})
            for place, at in enumerate(batch):
                for vector, positions in words_of[at]:
                    hidden[:, place, positions].mean(axis=1, out=vector)
        return found

    @torch.inference_mode()
    def _hidden(self, rows: dict[str, Any]) -> Vectors:
        """Return all hidden states of a batch, [layers, rows, tokens, width]."""
        inputs = self.tokenizer.pad(rows, return_tensors="pt").to(self.device)
        return torch.stack(self.model(**inputs, output_hidden_states=True).hidden_states).float().cpu().numpy()


def _by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield batches of numbers of rows of similar length."""
    order = sorted(range(len(lengths)), key=lambda at: lengths[at])
    for start in range(0, len(order), BATCH):
        yield order[start : start + BATCH]


def read_static(path: Path, vocabulary: Container[str] | None = None) -> StaticSource:
    """Read GloVe's text, word2vec's text (a first line with numbers of words and columns), or `.bin`, also .xz and .gz.

    Only words of the vocabulary are kept, if there is one. Raises DataError (file, line, remedy) for a damaged line.
    """
    if (path.with_suffix("") if path.suffix in OPENERS else path).suffix == BINARY:
        return _read_binary(path, vocabulary)
    rows: dict[str, int] = {}
    vectors: list[Vectors] = []
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
    return StaticSource(str(path), rows, np.array(vectors, dtype=np.float32).reshape(-1, width))


def _decoded(word: bytes, origin: str) -> str:
    try:
        return word.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{origin}: the word is no UTF-8; convert the file, and name binary files {BINARY}") from None


def _with_spaces(content: bytes, width: int) -> tuple[bytes, bytes, int]:
    """Return word, numbers (too many if the word ends with one) and how many of a line whose word has spaces."""
    word, *numbers = content.rsplit(b" ", width)
    parts = word.split(b" ")
    try:
        float(parts[-1])
    except ValueError:
        return word, b" ".join(numbers), width
    return parts[0], content.partition(b" ")[2], len(parts) - 1 + width


def _numbers(text: bytes, width: int, origin: str, word: str) -> Vectors:
    try:
        found = np.array(text.split(b" "), dtype=np.float32)
    except ValueError:
        raise DataError(f"{origin}: a line is a word and {width} numbers; what follows {show_value(word)} is not; "
                        "remove the line") from None  # fmt: skip
    if not np.isfinite(found).all():
        raise DataError(f"{origin}: a number of {show_value(word)} is not finite; remove the line")
    return found


def _read_binary(path: Path, vocabulary: Container[str] | None) -> StaticSource:
    check_extra("downstream", ["gensim"])
    from gensim.models import KeyedVectors

    try:
        found = KeyedVectors.load_word2vec_format(str(path), binary=True)
    except (*DAMAGED, ValueError, MemoryError) as error:
        raise DataError(f"{path}: no binary file of word2vec ({error}); other names than *{BINARY} are text") from None
    kept = [word for word in found.index_to_key if vocabulary is None or word in vocabulary]
    rows = {word: row for row, word in enumerate(kept)}
    return StaticSource(str(path), rows, found.vectors[[found.key_to_index[word] for word in kept]].astype(np.float32))


def split_words(text: str) -> list[str]:
    """Split a text at white space and around punctuation marks, as BERT's and ELMo's first step does."""
    return [sys.intern(word) for word, _ in SPLITTER.pre_tokenize_str(text)]
