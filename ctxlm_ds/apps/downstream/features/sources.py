"""Sources of vectors of words: models of transformers, models in a family's own format, files of static vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ctxlm_ds.apps.downstream.features.static import StaticVectors
from ctxlm_ds.apps.downstream.kinds.base import quiet_transformers
from ctxlm_ds.apps.downstream.kinds.tagging import encode_windows, word_places
from ctxlm_ds.apps.downstream.prepare import load_tokenizer, longest_input
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.export.base import WordLayers, own_format_in

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


class FeatureSource(ABC):
    """What gives vectors to the words of a sentence."""

    def __init__(self, name: str, num_layers: int, width: int) -> None:
        self.name = name
        self.num_layers = num_layers
        self.width = width

    def vectors(self, sentences: Sequence[Words]) -> Iterator[Vectors]:
        """Yield [layers, words, width] of each sentence, in order; 0 for a word that the source does not know."""
        for start in range(0, len(sentences), BLOCK):
            yield from self.block(sentences[start : start + BLOCK])

    @abstractmethod
    def block(self, sentences: Sequence[Words]) -> Iterable[Vectors]:
        """Return the vectors of some sentences, which are computed together."""

    def __str__(self) -> str:
        return self.name


def open_source(
    path: Path, pooling: Pooling | None = None, vocabulary: Container[str] | None = None, separate: bool = False
) -> FeatureSource:
    """Open a source.

    Args:
        path: a folder in Hugging Face's form or in a family's own format (ELMo), or a file of static vectors.
        pooling: vector of a word of several subwords (None: the first one's), refused for a source without subwords.
        vocabulary: words of a file that are kept (also in lower case); None keeps all.
        separate: both directions of an ELMo as separate layers: 2L + 1.

    Raises:
        ConfigError, TokenizerError, ExportError, DataError: the path holds no source, or a damaged one.
    """
    own = own_format_in(path) if path.is_dir() else None
    if pooling is not None and (own is not None or path.is_file()):
        raise ConfigError(f"--pooling {pooling}: {path} has no subwords; drop the option")
    if own is not None:
        return OwnSource(str(path), own.word_layers(path), separate)
    if separate:
        raise ConfigError(f"--separate-directions: {path} is no ELMo (options.json and weights.hdf5)")
    if path.is_dir():
        return TransformersSource(path, pooling or "first")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder; give a model's folder or a file of static vectors")
    return StaticSource(str(path), StaticVectors.read(path, vocabulary))


class StaticSource(FeatureSource):
    """One vector for each word, regardless of what surrounds it."""

    def __init__(self, name: str, static: StaticVectors) -> None:
        super().__init__(name, 1, static.width)
        self.static = static
        self.num_words = 0
        """Words that were looked up."""
        self.num_unknown = 0
        """Words among them without a vector."""

    def block(self, sentences: Sequence[Words]) -> Iterator[Vectors]:
        for words in sentences:
            self.num_words += len(words)
            self.num_unknown += sum(self.static.row_of(word) is None for word in words)
            yield self.static.look_up(words)[None]


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
            computed = self._layers([sentences[at] for at in batch])
            found |= zip(batch, computed, strict=True)
        yield from (self._directions(found[at]) for at in range(len(sentences)))

    def _directions(self, vectors: Vectors) -> Vectors:
        """Split layers [L + 1, n, 2p] to [2L + 1, n, p]: x, then forward and backward of each LSTM (Peters 2018)."""
        if not self._separate:
            return vectors
        halves = np.split(vectors, 2, axis=-1)
        return np.concatenate([halves[0][:1], np.stack(halves, axis=1)[1:].reshape(-1, *halves[0].shape[1:])])


class TransformersSource(FeatureSource):
    """All hidden states of an encoder, of the encoder of an encoder-decoder, or of a decoder."""

    def __init__(self, folder: Path, pooling: Pooling = "first", max_length: int = LONGEST) -> None:
        from transformers import AutoModel

        quiet_transformers()
        self.tokenizer = load_tokenizer(folder, splits_words=True)
        self.tokenizer.padding_side = "right"
        self.max_length = longest_input(folder, self.tokenizer, max_length)
        options = {"dtype": torch.float32, "use_safetensors": True, "local_files_only": True}
        try:
            model = AutoModel.from_pretrained(folder, **options)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: its model cannot be loaded: {str(error).splitlines()[0]}") from None
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = (model.get_encoder() if model.config.is_encoder_decoder else model).eval().to(self.device)
        self.pooling = pooling
        probe = self._hidden({"input_ids": [[0]], "attention_mask": [[1]]})
        super().__init__(str(folder), probe.shape[0], probe.shape[-1])

    def block(self, sentences: Sequence[Words]) -> list[Vectors]:
        texts = [list(words) or [""] for words in sentences]
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
        states = self.model(**inputs, output_hidden_states=True).hidden_states
        found: Vectors = torch.stack(states).float().cpu().numpy()
        return found


def _by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield batches of numbers of rows of similar length."""
    order = sorted(range(len(lengths)), key=lambda at: lengths[at])
    for start in range(0, len(order), BATCH):
        yield order[start : start + BATCH]
