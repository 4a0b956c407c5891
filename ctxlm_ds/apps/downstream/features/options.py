"""Options for frozen vectors in place of a model that is fine-tuned, and the layers they choose. Imports no torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.apps.downstream.kinds.entries import CRF_FORM, GPT1_FORM, TEXT_FORM
from ctxlm_ds.console import at_least
from ctxlm_ds.errors import ConfigError

JOINS = ("sum", "mean", "concat", "mix")
FORMS = (
    "a layer (0: embeddings, -1: the last), all, or sum:N, mean:N, concat:N, mix:N of the last N layers (or of `all`)"
)
GRID = {"batch_sizes": [32], "learning_rates": [1e-3], "epochs": [10.0]}
"""Small models that start from random weights."""
OF_FEATURES = ("layers", "pooling", "static", "mix_at", "mix_l2", "layer_dropout", "encoder", "hidden_size",
               "encoder_layers", "dropout")  # fmt: skip
OF_FINE_TUNING = (
    "train_layers", "gradual", "layer_decay", "lora", "random", "save_model", "train_on", "read_from",
    TEXT_FORM, GPT1_FORM, CRF_FORM, "beams", "lm_weight", "max_length", "deepspeed",
)  # fmt: skip


def number(lowest: float, below: float, words: str) -> Callable[[str], float]:
    """Return an argparse type: a number from `lowest` on and below another one; `words` say so."""

    def number(text: str) -> float:
        value = float(text)
        if not lowest <= value < below:
            raise argparse.ArgumentTypeError(f"{text} is not a number {words}")
        return value

    return number


POSITIVE = number(math.ulp(0.0), 1e9, "above 0")
NOT_NEGATIVE = number(0.0, 1e9, "of at least 0")
SHARE = number(0.0, 1.0, "from 0 up to 1")


@dataclass(frozen=True)
class LayerChoice:
    """Layers of a source."""

    how: str
    """`layer`, `all`, or one of JOINS."""
    number: int | None = None
    """The layer, or how many of the last are joined; None is all."""

    @classmethod
    def parse(cls, text: str) -> LayerChoice:
        """Read a choice in one of the forms of FORMS; another one is a ConfigError."""
        how, colon, number = text.partition(":")
        try:
            if text == "all":
                return cls("all")
            if not colon:
                return cls("layer", int(text))
            if how in JOINS and (number == "all" or int(number) >= 1):
                return cls(how, None if number == "all" else int(number))
        except ValueError:
            pass
        raise ConfigError(f"--layers {text}: expected {FORMS}")

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
        found = self.select(np.empty((num_layers, 0, width), dtype=np.float32))
        return found.shape[0], found.shape[2]

    def select(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map [layers, words, width] to [vectors, words, width]; `mix` leaves its layers for a trained mix."""
        if self.how == "layer":
            assert self.number is not None
            return vectors[self.number][None]
        last = vectors if self.number is None else vectors[-self.number :]
        if self.how in ("sum", "mean"):
            return getattr(last, self.how)(axis=0, keepdims=True)
        if self.how == "concat":
            return np.concatenate(list(last), axis=-1)[None]
        return last


def add_features(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("frozen vectors and a small model of the task (with --features)").add_argument
    add("--layers", metavar="WHICH", default="-1", help="a layer (0: embeddings, -1: last), or {sum, mean, concat, "
        "mix}:N of the last N (or `all`); default: -1")  # fmt: skip
    add("--pooling", choices=["first", "mean", "last"], help="vector of a word of several subwords (default: first)")
    add("--static", type=Path, metavar="FILE", help="further, static vectors, at the input of the RNN")
    add("--mix-at", choices=["input", "output", "both"], default="input", help="of the RNN (ELMo, section 3.3)")
    add("--mix-l2", type=NOT_NEGATIVE, default=0.0, metavar="X", help="factor of ||w||^2 of a mix in the loss")
    add("--layer-dropout", type=SHARE, default=0.0, metavar="P", help="leave out each layer of a mix, in training")
    add("--encoder", choices=["bilstm", "none"], default="bilstm")
    add("--hidden-size", type=at_least(1), default=128, metavar="N", help="cells of each direction")
    add("--encoder-layers", type=at_least(1), default=1, metavar="N")
    add("--dropout", type=SHARE, default=0.3, metavar="P", help="at the input and the output of the RNN")


def check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse options that belong to fine-tuning, or to frozen vectors (ConfigError)."""
    other, needed = (OF_FEATURES, "--features") if arguments.features is None else (OF_FINE_TUNING, "--model")
    for name in other:
        if getattr(arguments, name) != parser.get_default(name):
            raise ConfigError(f"--{name.replace('_', '-')}: only with {needed}")


def recorded_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what settings.json records of the options; nothing for fine-tuning."""
    if arguments.features is None:
        return {}
    found = {name: getattr(arguments, name) for name in OF_FEATURES} | {"pooling": arguments.pooling or "first"}
    return {"features": found | {"static": None if arguments.static is None else str(arguments.static.resolve())}}
