"""Vectors of words from an exported model (Peters 2018, section 3.1): the context-free layer, and each LSTM layer.

Shape letters: b rows, s positions, p projected width, c characters of a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.own_format import OwnFolder, WordLayers
from ctxlm_ds.families.elmo.config import ElmoSection
from ctxlm_ds.families.elmo.layers import HIDDEN, elmo_layers
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerSequence
from ctxlm_ds.models.spec import ModelBuild
from ctxlm_ds.tokenizers.kinds.characters import BEGIN, END, UNK, char_ids


class BilmLayers(WordLayers):
    """The layers of both directions, which read `<S>`, the words and `</S>`, with states of 0 before the first."""

    def __init__(self, opened: OwnFolder, folder: Path) -> None:
        """Build the model.

        Raises:
            ExportError: a model of words has no tokenizer in its folder.
        """
        assert isinstance(opened.model, ElmoSection)
        self.model = opened.model
        self.num_layers, self.width = self.model.num_layers + 1, 2 * self.model.projection_size
        self._encode = self._characters if self.model.inputs == "characters" else self._word_ids(folder)
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

    def _characters(self, words: Sequence[str]) -> NDArray[np.integer]:
        return char_ids(words, self.model.max_characters)

    def _word_ids(self, folder: Path) -> Callable[[Sequence[str]], NDArray[np.integer]]:
        from ctxlm_ds.tokenizers.load import load_tokenizer

        if not (folder / "tokenizer.json").is_file():
            raise ExportError(f"{folder}: no tokenizer.json, whose ids the model's table of words has; export it again")
        ids = load_tokenizer(folder).backend.get_vocab()
        return lambda words: np.array([ids.get(word, ids[UNK]) for word in words], dtype=np.int64)


def _of_words(layers: Sequence[tuple[Tensor, Tensor]], row: int, count: int) -> NDArray[np.float32]:
    """Return [layers, words, 2p] of a row: both directions of each word, without the sentence's ends."""
    both = [
        torch.cat([ahead[row, 1 : count + 1], back[row, : count + 2].flip(0)[1 : count + 1]], dim=-1)
        for ahead, back in layers
    ]
    return torch.stack(both).numpy()
