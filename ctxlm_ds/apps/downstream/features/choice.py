"""Which layers of a source are read, and how several become one vector. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.errors import ConfigError

How = Literal["layer", "all", "sum", "mean", "concat", "mix"]
JOINS: tuple[How, ...] = ("sum", "mean", "concat", "mix")
FORMS = (
    "a layer (0: embeddings, -1: the last), all, or sum:N, mean:N, concat:N, mix:N of the last N layers (or of `all`)"
)


@dataclass(frozen=True)
class LayerChoice:
    """Layers of a source."""

    how: How
    number: int | None = None
    """The layer, or how many of the last are joined; None is all."""

    @classmethod
    def parse(cls, text: str) -> LayerChoice:
        """Read a choice in one of the forms of FORMS.

        Raises:
            ConfigError: the text has none of them.
        """
        try:
            if text == "all":
                return cls("all")
            name, colon, number = text.partition(":")
            if not colon:
                return cls("layer", int(text))
            how = next((one for one in JOINS if one == name), None)
            count = None if number == "all" else int(number)
            if how is None or (count is not None and count < 1):
                raise ValueError
            return cls(how, count)
        except ValueError:
            raise ConfigError(f"--layers {text}: expected {FORMS}") from None

    def __str__(self) -> str:
        if self.how in JOINS:
            return f"{self.how}:{'all' if self.number is None else self.number}"
        return "all" if self.how == "all" else str(self.number)

    def check(self, num_layers: int, source: object) -> None:
        """Raise ConfigError if a source has no such layers."""
        number, lowest = self.number or 0, -num_layers if self.how == "layer" else 0
        highest = num_layers - 1 if self.how == "layer" else num_layers
        if not lowest <= number <= highest:
            raise ConfigError(f"--layers {self}: {source} has {num_layers} layers, 0 (embeddings) to {num_layers - 1}")

    def shape(self, num_layers: int, width: int) -> tuple[int, int]:
        """Return the number of vectors of a word that `select` leaves, and their width."""
        count = num_layers if self.number is None else self.number
        if self.how in ("all", "mix"):
            return count, width
        return 1, width * count if self.how == "concat" else width

    def select(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map [layers, words, width] to [vectors, words, width]; `mix` leaves its layers for a trained mix."""
        if self.how == "layer":
            assert self.number is not None
            return vectors[self.number][None]
        last = vectors if self.number is None else vectors[-self.number :]
        if self.how == "sum":
            return last.sum(axis=0)[None]
        if self.how == "mean":
            return last.mean(axis=0)[None]
        if self.how == "concat":
            return np.concatenate(list(last), axis=-1)[None]
        return last
