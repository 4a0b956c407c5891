"""The interface of a family whose models have no class in transformers, but a format of their authors' programs.

`to-hf` writes that format, model.safetensors with all weights under our names, config.json and the tokenizer.
`initialize_from` reads it back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.key_maps import Shape, WeightSource
from ctxlm_ds.export.verify import Comparison
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.registry import FAMILIES, load_object

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True)
class OwnFolder:
    """An opened folder."""

    source: WeightSource
    """Its weights under our names."""
    model: ModelSection
    """Its settings, with vocab_size set."""
    outputs: tuple[str, ...]
    """What the weights compute."""


class WordLayers(ABC):
    """A folder's model as a source of vectors of words."""

    num_layers: int
    width: int

    @abstractmethod
    def __call__(self, sentences: Sequence[Sequence[str]]) -> list[NDArray[np.float32]]:
        """Return [layers, words, width] of each sentence; a sentence's vectors do not depend on the others."""


class OwnFormat(ABC):
    """A family's part of the conversion."""

    title: ClassVar[str]
    """The format, for people."""
    loading: ClassVar[str]
    """Python that loads the folder `{folder}`."""

    @abstractmethod
    def claims(self, folder: Path) -> bool:
        """Return whether a folder has the files of the format."""

    @abstractmethod
    def write(self, folder: Path, model: ModelSection, source: WeightSource) -> None:
        """Write the weights and settings.

        Raises:
            ExportError: the format cannot hold the model, or a package is missing.
        """

    @abstractmethod
    def open(self, folder: Path) -> OwnFolder:
        """Open a folder.

        Raises:
            ExportError: a file is damaged or lacks weights, or a package is missing.
        """

    def word_layers(self, folder: Path) -> WordLayers:
        """Return what computes vectors of words from a folder's model.

        Raises:
            ExportError: the format's models give none, or as `open`.
        """
        raise ExportError(f"{folder}: models of this format ({self.title}) give no vectors of words")


def own_format_of(family: str) -> OwnFormat | None:
    """Return a family's format; None if transformers has its classes, or if it has neither."""
    target = FAMILIES.get(family).own_format
    return None if target is None else load_object(target)


def own_format_in(folder: Path) -> OwnFormat | None:
    """Return the format of a folder, or None if it is in none of them."""
    formats = (own_format_of(name) for name in FAMILIES.names())
    return next((each for each in formats if each is not None and each.claims(folder)), None)


def compare_weights(ours: WeightSource, written: WeightSource, bound: float) -> Comparison:
    """Compare the written parameters, one at a time, with those of a checkpoint."""
    differences, magnitudes = [], []
    for name in written.names():
        value = ours.read_full(name)
        differences.append(float((value - written.read_full(name)).abs().max()))
        magnitudes.append(float(value.abs().max()))
    return Comparison("weights", max(differences), max(magnitudes), bound)


class Tensors:
    """Weights under our names in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def shape(self, name: str) -> Shape:
        return tuple(self._tensors[name].shape)

    def read_full(self, name: str) -> Tensor:
        return self._tensors[name]
