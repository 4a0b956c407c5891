"""Vectors of words and their log-probabilities under an exported ELMo.

A direction reads `<S>` (backward `</S>`) and the words, and predicts the next word among all words of the softmax; a
word outside of them is `<UNK>`. Shape letters: b rows, s positions, h width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import OwnFolder, WordLayers
from ctxlm_ds.families.elmo.config import ElmoSection
from ctxlm_ds.families.elmo.layers import HIDDEN, elmo_layers
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerSequence, ModelBuild
from ctxlm_ds.parallel.linear_cross_entropy import chunk_rows
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.kinds.characters import BEGIN, END, UNK, char_ids
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.untrusted_json import read_json_object

SOFTMAX = ("softmax.weight", "softmax.bias")
BATCH = 64
States = list[dict[str, Tensor]]
"""The carried tensors of each part of the layers."""


class BilmLayers(WordLayers):
    """The layers of both directions; for vectors they read `<S>`, the words and `</S>`, from states of 0."""

    def __init__(self, opened: OwnFolder, folder: Path) -> None:
        """Build the model; ExportError if a model of words has no tokenizer in its folder."""
        assert isinstance(opened.model, ElmoSection)
        self.model, self._opened, self._folder = opened.model, opened, folder
        self.num_layers, self.width = self.model.num_layers + 1, 2 * self.model.projection_size
        of_characters = partial(char_ids, size=self.model.max_characters)
        self._encode = of_characters if self.model.inputs == "characters" else partial(_word_ids, self._ids)
        layers = elmo_layers(self.model, ModelBuild((), KernelSet({}, "cpu", torch.float32)))
        first = len(layers) - 1 - self.model.num_layers
        stops = list(accumulate([first] + [1] * self.model.num_layers))
        parts = [layers[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
        self._parts = [LayerSequence(part, HIDDEN).eval() for part in parts]
        for part in self._parts:
            for name, parameter in part.named_parameters():
                parameter.data.copy_(opened.source.read_full(name))

    @torch.no_grad()
    def __call__(self, sentences: Sequence[Sequence[str]]) -> list[NDArray[np.float32]]:
        enclosed = [[BEGIN, *words, END] for words in sentences]
        fields = self._fields(enclosed)
        layers: list[tuple[Tensor, Tensor]] = []
        for part in self._parts:
            found = part.run(fields)
            layers.append((found[HIDDEN[0]], found[HIDDEN[1]]))
            fields = found
        return [_of_words(layers, row, len(words)) for row, words in enumerate(sentences)]

    def _fields(self, sentences: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        """Return both directions' inputs, each filled up behind its last word."""
        longest = max(map(len, sentences))
        names = ("character_ids", "reversed_character_ids")
        if self.model.inputs == "words":
            names = ("input_ids", "reversed_input_ids")
        encoded = [self._encode(words) for words in sentences]
        fields = {}
        for name, step in zip(names, (1, -1), strict=True):
            table = np.zeros((len(encoded), longest, *encoded[0].shape[1:]), dtype=np.int64)
            for row, ids in zip(table, encoded, strict=True):
                row[: len(ids)] = ids[::step]
            fields[name] = torch.from_numpy(table)
        return fields

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if not (self._folder / "tokenizer.json").is_file():
            raise ExportError(f"{self._folder}: no tokenizer.json, whose ids the model's table of words has; "
                              "export it again")  # fmt: skip
        return load_tokenizer(self._folder)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return self._tokenizer.backend.get_vocab()

    def split(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        return list(self._tokenizer.backend.pre_tokenizer.pre_tokenize_str(text))

    @torch.no_grad()
    def log_probs(
        self, sentences: Sequence[Sequence[str]], before: Sequence[Sequence[str]]
    ) -> list[NDArray[np.float64]]:
        if not set(SOFTMAX) <= set(self._opened.source.names()):
            raise ExportError(f"{self._folder}: no {SOFTMAX[0]} in model.safetensors; export it again")
        states: States = [{} for _ in self._parts]
        path = self._folder / "config.json"
        if not (path.is_file() and read_json_object(path, ExportError).get("state_dropout")):
            for words in before:
                _, states = self._read([words], states)
        order = sorted(range(len(sentences)), key=lambda at: len(sentences[at]))
        found: dict[int, NDArray[np.float64]] = {}
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            found |= zip(batch, self._of_batch([sentences[at] for at in batch], states), strict=True)
        return [found[at] for at in range(len(sentences))]

    def _of_batch(self, sentences: Sequence[Sequence[str]], states: States) -> list[NDArray[np.float64]]:
        size, _ = self._opened.source.shape(SOFTMAX[0])
        numbers = [_word_ids(self._ids, words) for words in sentences]
        targets = [torch.from_numpy(np.where(row < size, row, self._ids[UNK])) for row in numbers]
        (ahead, back), _ = self._read(sentences, states)
        forward = self._chosen(ahead, targets)
        backward = [row.flip(0) for row in self._chosen(back, [row.flip(0) for row in targets])]
        return [torch.stack(both).numpy() for both in zip(forward, backward, strict=True)]

    def _chosen(self, hidden: Tensor, targets: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the fp64 log-probability of each row's targets, which its first hidden states [b, s, h] predict."""
        table, bias = (self._opened.source.read_full(name).float() for name in SOFTMAX)
        flat = torch.cat([row[: len(own)] for row, own in zip(hidden, targets, strict=True)])
        size = chunk_rows(len(flat), len(table), flat.device) or 1
        chunks = zip(flat.split(size), torch.cat(list(targets)).split(size), strict=True)
        values = [F.cross_entropy(F.linear(x, table, bias), own, reduction="none") for x, own in chunks]
        return (-torch.cat(values).double()).split([len(own) for own in targets])

    def _read(self, sentences: Sequence[Sequence[str]], states: States) -> tuple[tuple[Tensor, Tensor], States]:
        """Return the last layer's outputs [b, s, h] of both directions, and the states after the last words."""
        (forward, ahead), _ = self._fields([[BEGIN, *words] for words in sentences]).items()
        _, (backward, back) = self._fields([[*words, END] for words in sentences]).items()
        fields, after = {forward: ahead, backward: back}, []
        for part, held in zip(self._parts, states, strict=True):
            part.carried.begin_evaluation()
            for name, state in held.items():
                part.carried.put(name, state.expand(len(sentences), -1).contiguous())
            fields = part.run(fields)
            after.append({name: x for name in part.carried.names if (x := part.carried.take(name)) is not None})
            part.carried.end_evaluation()
        return (fields[HIDDEN[0]], fields[HIDDEN[1]]), after


def _of_words(layers: Sequence[tuple[Tensor, Tensor]], row: int, count: int) -> NDArray[np.float32]:
    """Return [layers, words, 2p] of a row: both directions of each word, without the sentence's ends."""
    both = [
        torch.cat([ahead[row, 1 : count + 1], back[row, : count + 2].flip(0)[1 : count + 1]], dim=-1)
        for ahead, back in layers
    ]
    return torch.stack(both).numpy()


def _word_ids(ids: Mapping[str, int], words: Sequence[str]) -> NDArray[np.integer]:
    return np.array([ids.get(word, ids[UNK]) for word in words], dtype=np.int64)
