"""ELMo's settings (Peters 2018): a bidirectional language model of characters, or of words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from ctxlm_ds.families.base import Family, dropout_problems
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import ModelSection, PositiveFloat, PositiveInt, Probability, SmallInt, Width

CHARACTERS = 261
"""Bytes, the ends of a sentence and of a word, and padding of a word; id 0 is padding of a row."""
PUBLISHED_FILTERS = [(1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024)]


class ElmoSection(ModelSection):
    """Two language models, one of each direction, over words made of characters; they share input and softmax layers.

    The rows of both read their sentences one after the other, and each step continues with the cells of the step
    before. Tensor parallelism splits the softmax, which has three quarters of the published weights; each rank computes
    all of the other layers, also under sequence parallelism.
    """

    same_function: ClassVar[tuple[str, ...]] = (
        "family", "inputs", "cell_clip", "projection_clip", "residual", "max_characters",
    )  # fmt: skip

    family: str = "elmo"
    inputs: Literal["characters", "words"] = "characters"
    """What a word's vector is made of: its `characters`, or a row of a table (`words`, a baseline)."""
    projection_size: Width = 512
    """Width of words' vectors and of each direction's outputs."""
    cell_size: Width = 4096
    """Cells of each LSTM layer and direction, which a projection maps to projection_size."""
    num_layers: SmallInt = 2
    """LSTM layers of each direction."""
    cell_clip: PositiveFloat | None = 3.0
    """Largest magnitude of a cell; null does not clip."""
    projection_clip: PositiveFloat | None = 3.0
    """Largest magnitude of a projected output; null does not clip."""
    residual: bool = True
    """Add the input of each LSTM layer but the first to its output."""
    dropout: Probability = 0.1
    """Dropout of the inputs of each LSTM layer, and of the outputs that the softmax reads."""
    state_dropout: Probability = 0.0
    """Share of each step's rows that begin with zeros in place of the states that they carry. With 0, as published,
    only the first step begins with zeros, and the outputs for text that begins with them can be arbitrary."""
    num_sampled: PositiveInt | None = 8192
    """Words, drawn by their rank in the vocabulary, with which training compares each next word; null compares it with
    all, as evaluation does."""
    character_size: Width = 16
    """Width of characters' vectors."""
    max_characters: SmallInt = 50
    """Characters of a word, with the two that enclose it."""
    filters: list[tuple[SmallInt, Width]] = PUBLISHED_FILTERS
    """[width in characters, number] of the convolution's filters."""
    num_highways: SmallInt = 2
    """Highway layers after the convolution."""

    @property
    def width(self) -> int | None:
        return self.projection_size

    @property
    def drops(self) -> bool:
        return super().drops or self.num_sampled is not None

    @property
    def idle_settings(self) -> tuple[str, ...]:
        characters = ("character_size", "max_characters", "filters", "num_highways")
        return characters if self.inputs == "words" else ()

    def problems(self) -> Iterator[Problem]:
        yield from dropout_problems(self, "dropout")
        if self.num_sampled is not None and self.num_sampled > (self.vocab_size or self.num_sampled):
            text = f"{self.num_sampled} different words of a vocabulary of {self.vocab_size}; lower it, or set null"
            yield Problem("model.num_sampled", text, ("model.vocab_size",))
        widest = max((width for width, _ in self.filters), default=0)
        if self.inputs == "characters" and not 0 < widest <= self.max_characters:
            text = f"the widest filter reads {widest} of model.max_characters {self.max_characters}; expected 1 to that"
            yield Problem("model.filters", text, ("model.max_characters",))


def _tiny() -> dict[str, Any]:
    model = {
        "family": "elmo", "projection_size": 32, "cell_size": 48, "num_sampled": 16, "character_size": 8,
        "filters": [[1, 8], [2, 16], [3, 32]], "num_highways": 1,
    }  # fmt: skip
    return {
        "model": model,
        "objective": {"name": "bidirectional_lm"},
        "data": {"sample_format": "bidirectional_lanes", "seq_length": 12},
    }


ELMO = Family(
    name="elmo",
    title="ELMo (Peters 2018)",
    section=ElmoSection,
    layers="ctxlm_ds.families.elmo.layers:elmo_layers",
    own_format="ctxlm_ds.families.elmo.export:FORMAT",
    outputs=frozenset({"forward_loss", "forward_correct", "backward_loss", "backward_correct"}),
    objective="bidirectional_lm",
    sample_format="bidirectional_lanes",
    tokenizer="elmo",
    tiny=_tiny,
    vocab_size=793_471,
)
