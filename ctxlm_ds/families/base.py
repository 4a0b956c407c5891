"""What a family of models is to the rest of the system, and the settings that transformers share.

A family is a folder: config.py (this file's classes, no torch), layers.py (its list of layers), export.py (Hugging
Face). One line of registry.py names it. docs/extending.md shows how one is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ctxlm_ds.recipe.choices import listed
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.section import PositiveFloat, Probability, SmallInt, Width
from ctxlm_ds.recipe.sections import DataSection, ModelSection


@dataclass(frozen=True)
class Family:
    """One family of models."""

    name: str
    """As recipes name it."""
    title: str
    """For people: name and publication."""
    section: type[ModelSection]
    """Settings of the recipe's `model` section."""
    layers: str
    """`module:function` from (section, ModelBuild) to the list of LayerDescription."""
    outputs: frozenset[str]
    """Tensors that an objective may ask the model for."""
    objective: str
    """Objective that it was published with: the default for imported models."""
    sample_format: str
    """Sample format that it was published with."""
    tokenizer: str
    """Type of tokenizer that it was published with (tools/train_tokenizer.py)."""
    tiny: Callable[[], dict[str, Any]]
    """Makes the `model`, `objective` and `data` sections of a recipe small enough for tests."""
    vocab_size: int | None = None
    """Words of the tokenizer that it was published with: what a plan counts if the recipe leaves the size open."""
    export: str | None = None
    """`module:object` of its FamilyExport (export/base.py); None if transformers has no such class."""
    frozen: str | None = None
    """`module:function` from the section to a function from the name of a parameter that no step changes (a teacher's)
    to its whole fp32 value; None draws initial values."""


class TransformerSection(ModelSection):
    """The shape of a transformer."""

    same_function: ClassVar[tuple[str, ...]] = (
        "family", "num_attention_heads", "hidden_activation", "layer_norm_eps",
    )  # fmt: skip

    hidden_size: Width = 768
    """Width of the residual stream."""
    num_layers: SmallInt = 12
    """Number of transformer layers."""
    num_attention_heads: SmallInt = 12
    """Attention heads; must divide hidden_size."""
    intermediate_size: Width = 3072
    """Width of the feed-forward layer."""
    max_position_embeddings: Width = 512
    """Longest sequence the position table can hold (RoBERTa's two unused rows are added by the model)."""
    hidden_activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    """Activation of the feed-forward layer; `gelu` is the exact erf form."""
    layer_norm_eps: PositiveFloat = 1e-12
    """Epsilon of every LayerNorm (BERT 1e-12, RoBERTa and GPT 1e-5)."""
    hidden_dropout: Probability = 0.1
    """Dropout on embeddings and on the output of attention and feed-forward."""
    attention_dropout: Probability = 0.1
    """Dropout on attention probabilities."""
    initializer: Literal["normal", "truncated_normal"] = "normal"
    """Distribution of the initial weights; `truncated_normal` has none beyond two deviations (BERT's own code)."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""

    @property
    def num_blocks(self) -> int:
        return self.num_layers

    @property
    def longest_sequence(self) -> int | None:
        return self.max_position_embeddings

    @property
    def width(self) -> int | None:
        return self.hidden_size

    @property
    def drops(self) -> bool:
        return self.hidden_dropout > 0.0 or self.attention_dropout > 0.0

    def problems(self) -> Iterator[Problem]:
        if self.hidden_size % self.num_attention_heads:
            yield Problem(
                "model.num_attention_heads",
                f"{self.num_attention_heads} does not divide model.hidden_size {self.hidden_size}; "
                f"{nearest_divisor(self.hidden_size, self.num_attention_heads)} does",
                ("model.hidden_size",),
            )
        for name in ("hidden_dropout", "attention_dropout"):
            if getattr(self, name) >= 1.0:
                yield Problem(f"model.{name}", "1 drops everything; expected below 1 (0.1 as published)")

    def row_problems(self, data: DataSection) -> Iterator[Problem]:
        if data.seq_length > self.max_position_embeddings:
            yield Problem(
                "data.seq_length",
                f"{data.seq_length} is longer than model.max_position_embeddings {self.max_position_embeddings}; "
                "shorten the rows or lengthen the table",
                ("model.max_position_embeddings",),
            )

    def tensor_parallel_problems(self, size: int) -> Iterator[Problem]:
        heads, inner = self.num_attention_heads, self.intermediate_size
        both = [number for number in range(1, heads + 1) if heads % number == 0 == inner % number]
        fitting = f"{listed(map(str, both))} would do"
        path = "parallel.tensor_parallel_size"
        if heads % size:
            yield Problem(
                path,
                f"{size} does not divide model.num_attention_heads {heads}, and every rank holds whole heads; "
                f"{fitting}",
                ("model.num_attention_heads",),
            )
        if inner % size:
            yield Problem(
                path,
                f"{size} does not divide model.intermediate_size {inner}, whose rows the ranks share; {fitting}",
                ("model.intermediate_size",),
            )


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of `number` that is nearest to `wanted`."""
    near = (candidate for distance in range(number + wanted) for candidate in (wanted - distance, wanted + distance))
    return next(candidate for candidate in near if candidate > 0 and number % candidate == 0)
