"""Kinds of tasks over frozen vectors of words, with a small model: a biLSTM or none, then tags, labels or numbers.

They read, predict and judge as those of fine-tuning do. Shape letters: b rows, n words, k vectors of a word, w their
width, s width of static vectors, d width of the encoder.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from ctxlm_ds.apps.downstream.examples import Example, Parts
from ctxlm_ds.apps.downstream.features.options import LayerChoice
from ctxlm_ds.apps.downstream.features.sources import FeatureSource, StaticSource, open_source, split_words
from ctxlm_ds.apps.downstream.kinds.base import IGNORED_LABEL, Features, Kind
from ctxlm_ds.apps.downstream.kinds.entries import Answer
from ctxlm_ds.apps.downstream.kinds.sequence import Classification, Regression
from ctxlm_ds.apps.downstream.kinds.tagging import Tagging
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.console import logger
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.problems import show_value
from ctxlm_ds.registry import load_object

Encoder = Literal["bilstm", "none"]
Place = Literal["input", "output", "both"]


@dataclass(frozen=True)
class HeadSettings:
    """Settings of the task's model."""

    encoder: Encoder = "bilstm"
    hidden_size: int = 128
    num_layers: int = 1
    dropout: float = 0.3
    mix_at: Place = "input"
    """Where the vectors enter: at the input of the RNN, next to its output, or both (Peters 2018, section 3.3)."""
    mix_l2: float = 0.0
    layer_dropout: float = 0.0


@dataclass(frozen=True)
class InputShape:
    """What comes with each word."""

    num_vectors: int
    width: int
    static_width: int = 0
    """0 without static vectors."""


class ScalarMix(nn.Module):
    """A trained weighted sum of layers (Peters 2018, equation 1; allennlp/modules/scalar_mix.py).

    gamma * sum_j softmax(w)_j h_j, with gamma 1 and w 0 at the start: the mean of the layers.

    In training, `layer_dropout` leaves out each layer with that probability, and the others share its weight (UDify,
    Kondratyuk and Straka 2019).
    """

    def __init__(self, num_layers: int, layer_dropout: float = 0.0) -> None:
        super().__init__()
        self.scalars = nn.Parameter(torch.zeros(num_layers))
        self.gamma = nn.Parameter(torch.ones(()))
        self.layer_dropout = layer_dropout

    def weights(self) -> Tensor:
        """Return softmax(w), [layers]; without the layers that are dropped."""
        scalars = self.scalars
        if self.training and self.layer_dropout > 0:
            dropped = torch.rand_like(scalars) < self.layer_dropout
            if not dropped.all():
                scalars = scalars.masked_fill(dropped, -torch.inf)
        return scalars.softmax(dim=0)

    def forward(self, layers: Tensor) -> Tensor:
        """Map layers [..., layers, width] to [..., width]."""
        return self.gamma * torch.einsum("l,...lw->...w", self.weights(), layers)


class FrozenModel(nn.Module):
    """A tag of each word, or a label or a number of a text, from the mean of its words.

    A pair of texts is u, v, |u - v| and u * v (InferSent, Conneau 2017).
    """

    def __init__(
        self, shape: InputShape, settings: HeadSettings, num_labels: int, answer: Answer, pairs: bool = False
    ) -> None:
        super().__init__()
        places = ("input", "output") if settings.mix_at == "both" else (settings.mix_at,)
        self.answer, self.pairs, self.mix_l2 = answer, pairs, settings.mix_l2
        self.mixes = nn.ModuleDict({place: ScalarMix(shape.num_vectors, settings.layer_dropout) for place in places})
        self.dropout = nn.Dropout(settings.dropout)
        width = shape.static_width + shape.width * ("input" in places)
        self.rnn: nn.LSTM | None = None
        if settings.encoder == "bilstm":
            self.rnn = nn.LSTM(
                width, settings.hidden_size, settings.num_layers, batch_first=True, bidirectional=True,
                dropout=settings.dropout if settings.num_layers > 1 else 0.0,
            )  # fmt: skip
            width = 2 * settings.hidden_size
        width += shape.width * ("output" in places)
        self.classifier = nn.Linear(width * (4 if pairs else 1), num_labels)

    def forward(
        self, vectors: Tensor, lengths: Tensor, static: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Map vectors [b, n, k, w], of pairs [b, 2, n, k, w], to logits [b, labels], or [b, n, labels] for tags.

        The loss is the mean over rows, or over words with a tag; in training with the penalty of the mixes.
        """
        if self.pairs:
            vectors, lengths = _first_then_second(vectors), _first_then_second(lengths)
            static = None if static is None else _first_then_second(static)
        x = self._encode(vectors, static, lengths)
        if self.answer != "tags":
            inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
            x = (x * inside[..., None]).sum(dim=1) / lengths[:, None]
        if self.pairs:
            first, second = x.chunk(2)
            x = torch.cat([first, second, (first - second).abs(), first * second], dim=-1)
        logits = self.classifier(x)
        if labels is None:
            return {"logits": logits}
        if self.answer == "number":
            loss = F.mse_loss(logits.squeeze(-1), labels.to(logits.dtype))
        else:
            loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL)
        if self.training and self.mix_l2:
            # ||w||^2 draws the weights towards the mean of the layers.
            loss = loss + self.mix_l2 * torch.stack([mix.scalars.square().sum() for mix in self.mixes.values()]).sum()
        return {"loss": loss, "logits": logits}

    def _encode(self, vectors: Tensor, static: Tensor | None, lengths: Tensor) -> Tensor:
        """Map vectors [b, n, k, w] and static ones [b, n, s] of rows of `lengths` [b] words to [b, n, d]."""
        parts = [] if static is None else [static]
        if "input" in self.mixes:
            parts.append(self.mixes["input"](vectors))
        x = self.dropout(torch.cat(parts, dim=-1))
        if self.rnn is not None:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            x, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=vectors.shape[1])
            x = self.dropout(x)
        if "output" in self.mixes:
            x = torch.cat([x, self.dropout(self.mixes["output"](vectors))], dim=-1)
        return x


def _first_then_second(pairs: Tensor) -> Tensor:
    """Map [b, 2, ...] to [2b, ...]: all first texts, then all second ones."""
    return pairs.transpose(0, 1).flatten(0, 1)


@dataclass(frozen=True)
class FrozenInputs:
    """The vectors that a task's model reads."""

    source: FeatureSource
    choice: LayerChoice
    static: FeatureSource | None = None
    folder: Path | None = None
    """Where temporary files of vectors lie; None: the system's folder for them."""

    def __post_init__(self) -> None:
        self.choice.check(self.source.num_layers, self.source)

    @property
    def shape(self) -> InputShape:
        shape = self.choice.shape(self.source.num_layers, self.source.width)
        return InputShape(*shape, self.static.width if self.static is not None else 0)

    def rows(self, sentences: Sequence[Sequence[str]]) -> list[dict[str, NDArray[np.float32]]]:
        """Return, for each sentence, `vectors` [words, k, w] and, if there are static ones, `static` [words, s]."""
        shape = self.shape
        found = self._stored(self.source, self.choice, sentences, (shape.num_vectors, shape.width))
        rows = [{"vectors": vectors} for vectors in found]
        if self.static is not None:
            beside = self._stored(self.static, LayerChoice("layer", 0), sentences, (1, shape.static_width))
            rows = [row | {"static": vectors[:, 0]} for row, vectors in zip(rows, beside, strict=True)]
        return rows

    def _stored(
        self, source: FeatureSource, choice: LayerChoice, sentences: Sequence[Sequence[str]], shape: tuple[int, int]
    ) -> list[NDArray[np.float32]]:
        """Compute vectors once, into a temporary file: those of all layers may not fit in memory."""
        ends = np.cumsum([len(words) for words in sentences])
        with tempfile.TemporaryFile(dir=self.folder) as file:
            stored = np.memmap(file, dtype=np.float32, shape=(int(ends[-1]), *shape))
        rows = []
        for end, words, vectors in zip(ends, sentences, source.vectors(sentences), strict=True):
            row = stored[end - len(words) : end]
            row[:] = choice.select(vectors).swapaxes(0, 1)
            rows.append(row)
        return rows


@dataclass
class Frozen(Kind):
    """What kinds over frozen vectors share."""

    inputs: FrozenInputs = field(kw_only=True)
    head: HeadSettings = field(default_factory=HeadSettings, kw_only=True)

    def features(self, examples: Sequence[Example]) -> Features:
        segments = [_segments(self.task, example) for example in examples]
        computed = iter(self.inputs.rows([words for several in segments for words in several]))
        rows: list[dict[str, Any]] = []
        for example, texts in zip(examples, segments, strict=True):
            several = [next(computed) for _ in texts]
            row: dict[str, Any] = {name: [one[name] for one in several] for name in several[0]}
            rows.append(row | {"labels": self.target(example)} if example.label is not None or example.tags else row)
        sources = [{"example": at, "words": range(len(texts[0]))} for at, texts in enumerate(segments)]
        return Features(rows, sources, examples)

    def model(self, folder: Path, config: Any, random: bool) -> FrozenModel:
        pairs = "pair" in self.task.columns
        return FrozenModel(self.inputs.shape, self.head, len(self.labels), self.task.entry.answer, pairs)

    def collator(self) -> Any:
        return collate

    def facts(self, model: FrozenModel) -> dict[str, Any]:
        """Return the weights of layers that were learned, by the mix's place; nothing if there is a single vector."""
        model.eval()
        found = {
            place: {"weights": [round(one, 4) for one in mix.weights().tolist()], "gamma": round(mix.gamma.item(), 4)}
            for place, mix in model.mixes.items()
            if len(mix.scalars) > 1
        }
        return {"mix": found} if found else {}


@dataclass
class FrozenTagging(Frozen, Tagging):
    """One tag per word."""


@dataclass
class FrozenClassification(Frozen, Classification):
    """One label of a text, or of a pair of texts."""


@dataclass
class FrozenRegression(Frozen, Regression):
    """One number of a text, or of a pair of texts."""


def kind_of_features(arguments: argparse.Namespace, task: TaskDescription, parts: Parts) -> Kind:
    """Return the kind of a task over the vectors that the options name (ConfigError, DataError if there are none)."""
    head = HeadSettings(arguments.encoder, arguments.hidden_size, arguments.encoder_layers, arguments.dropout,
                        arguments.mix_at, arguments.mix_l2, arguments.layer_dropout)  # fmt: skip
    choice = LayerChoice.parse(arguments.layers)
    if choice.how == "all":
        raise ConfigError("--layers all: a task's model reads one vector of a word; give mix:all or concat:all")
    if arguments.static is not None and not arguments.static.is_file():
        raise ConfigError(f"--static {arguments.static}: no such file; give a file of static vectors")
    sentences = words_of(task, parts)
    words = {word for sentence in sentences for word in sentence}
    words |= {word.lower() for word in words}
    source = open_source(arguments.features, arguments.pooling, words, split=task.split_special_tokens)
    static = None if arguments.static is None else open_source(arguments.static, vocabulary=words)
    for each in (source, static):
        if each is not None:
            check_known_words(each, sentences)
    arguments.output.mkdir(parents=True, exist_ok=True)
    return make_frozen_kind(task, parts, FrozenInputs(source, choice, static, arguments.output), head)


def make_frozen_kind(task: TaskDescription, parts: Parts, inputs: FrozenInputs, head: HeadSettings) -> Kind:
    """Return the kind of a task over frozen vectors; ConfigError if it has none, or the RNN would read nothing."""
    if task.entry.frozen is None:
        raise ConfigError(f"--features: tasks of kind {task.kind} are fine-tuned only (--model)")
    if head.mix_at == "output" and inputs.static is None:
        raise ConfigError("--mix-at output: the RNN reads only static vectors then; give a file of them by --static")
    found: Any = load_object(task.entry.frozen, f"task kind {task.kind}")
    return found(task, None, parts.labels, task.max_length, inputs=inputs, head=head)


def words_of(task: TaskDescription, parts: Parts) -> list[list[str]]:
    """Return the words of all texts of a task, for reading a part of a file of static vectors only."""
    examples = [*parts.train, *parts.dev, *(parts.test or [])]
    return [words for example in examples for words in _segments(task, example)]


def check_known_words(source: FeatureSource, sentences: Sequence[Sequence[str]]) -> None:
    """Log the share of a task's words with a static vector, DataError for none; other sources have one of each."""
    if not isinstance(source, StaticSource):
        return
    known = [source.row_of(word) is not None for words in sentences for word in words]
    if not any(known):
        raise DataError(f"{source}: has none of the task's words, such as {show_value(sentences[0][0])}; "
                        "give vectors of the same language")  # fmt: skip
    logger.info("%s: has vectors of %.1f %% of the task's words", source, 100 * sum(known) / len(known))


def _segments(task: TaskDescription, example: Example) -> list[list[str]]:
    if task.entry.reads_words:
        return [list(example.words)]
    texts = [example.text, example.pair or ""] if "pair" in task.columns else [example.text]
    return [split_words(text) or [""] for text in texts]  # an empty text has one word without a vector


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Fill up vectors with 0 to the longest text of the batch: [b, n, k, w], of pairs [b, 2, n, k, w]."""
    batch: dict[str, Tensor] = {}
    if "labels" in rows[0]:
        labels = [torch.tensor(row["labels"]) for row in rows]
        batch["labels"] = pad_sequence(labels, True, IGNORED_LABEL) if labels[0].ndim > 0 else torch.stack(labels)
    for name in ("vectors", "static"):
        if name in rows[0]:
            texts = [torch.tensor(text) for row in rows for text in row[name]]
            shape = (len(rows),) if len(texts) == len(rows) else (len(rows), 2)
            batch[name] = pad_sequence(texts, batch_first=True).unflatten(0, shape)
            batch["lengths"] = torch.tensor([len(text) for text in texts]).view(shape)
    return batch
