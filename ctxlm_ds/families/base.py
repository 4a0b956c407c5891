"""A family of models, and the settings that transformers share.

A family is a folder: config.py (subclasses of this file's classes, no torch), layers.py (its list of layers), export.py
(Hugging Face). One line of registry.py names it. docs/extending.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ctxlm_ds.recipe.choices import listed
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, ModelSection, PositiveFraction, Probability, SmallInt, Width

RotaryBase = Annotated[float, Field(gt=1.0, le=1e12)]
DROPOUT_LANES = 4
"""Elements of a feed-forward layer whose dropout is drawn together."""


@dataclass(frozen=True)
class Family:
    """One family of models."""

    name: str
    """Name in recipes."""
    title: str
    """Name and publication, for people."""
    section: type[ModelSection]
    """Settings of the recipe's `model` section."""
    layers: str
    """`module:function` from (section, ModelBuild) to the list of LayerDescription."""
    outputs: frozenset[str]
    """Tensors that an objective may ask the model for."""
    objective: str
    """Published objective, the default for imported models."""
    sample_format: str
    """Published sample format."""
    tokenizer: str
    """Published type of tokenizer (ctxlm tokenizer)."""
    tiny: Callable[[], dict[str, Any]]
    """Makes the `model`, `objective` and `data` sections of a recipe small enough for tests."""
    vocab_size: int | None = None
    """Published size of the vocabulary, which a plan takes if the recipe sets none."""
    export: str | None = None
    """`module:object` of its FamilyExport (export/base.py); None if transformers has no such class."""
    own_format: str | None = None
    """`module:object` of its OwnFormat (export/base.py), if transformers has no such class but others do."""


def tiny_transformer(family: str, objective: str, sample_format: str, **model: Any) -> dict[str, Any]:
    """Return the sections of a transformer's recipe small enough for tests; None leaves a setting out."""
    shape = {"hidden_size": 32, "num_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    settings = {**shape, "max_position_embeddings": 64, **model}
    return {
        "model": {"family": family} | {name: value for name, value in settings.items() if value is not None},
        "objective": {"name": objective},
        "data": {"sample_format": sample_format, "seq_length": 32},
    }


class HeadsSection(ModelSection):
    """The shape of a model whose layers ranks split by heads and by rows of feed-forward layers."""

    shared_heads: ClassVar[str | None] = None
    """Setting of the heads of keys and values, if query heads share them."""
    inner_dropout: ClassVar[str | None] = None
    """Setting of the dropout inside feed-forward layers, if they have one."""

    def tensor_parallel_problems(self, size: int) -> Iterator[Problem]:
        yield from split_problems(self, size)

    def context_parallel_problems(self, size: int, tensor: int) -> Iterator[Problem]:
        yield from exchange_problems(self, size, tensor)


class TransformerSection(HeadsSection):
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
    layer_norm_eps: PositiveFraction = 1e-12
    """Epsilon of every LayerNorm (BERT 1e-12, RoBERTa and GPT 1e-5)."""
    hidden_dropout: Probability = 0.1
    """Dropout on embeddings and on the output of attention and feed-forward."""
    attention_dropout: Probability = 0.1
    """Dropout on attention probabilities."""
    initializer: Literal["normal", "truncated_normal"] = "normal"
    """Distribution of the initial weights; `truncated_normal` has none beyond two deviations (BERT's own code)."""
    initializer_range: PositiveFraction = 0.02
    """Standard deviation of the initial weights."""

    @property
    def longest_sequence(self) -> int | None:
        return self.max_position_embeddings

    def problems(self) -> Iterator[Problem]:
        yield from head_problems(self)
        yield from dropout_problems(self)

    def row_problems(self, data: DataSection) -> Iterator[Problem]:
        if data.seq_length > self.max_position_embeddings:
            text = (
                f"{data.seq_length} is longer than model.max_position_embeddings {self.max_position_embeddings}; "
                "shorten the rows or lengthen the table"
            )
            yield Problem("data.seq_length", text, ("model.max_position_embeddings",))


class PreNormSection(TransformerSection):
    """The shape of a transformer with a norm before each block and before the output layer."""

    output_norm: ClassVar[str] = "final_layer_norm"
    """Name of the norm whose result the output layer multiplies."""
    hidden_matrices: ClassVar[tuple[str, ...]] = ()
    """Parameters outside of the blocks that map the width to the width."""

    base_width: Width | None = None
    """Width (hidden_size) for which the initial values and rates of the recipe are; another width has its own by the
    maximal-update parametrisation (Yang 2022), if the heads keep their size. null: as the recipe says at any width."""

    @property
    def relative_width(self) -> float | None:
        """Width as a multiple of base_width; None if the recipe's values are for this width."""
        return None if self.base_width is None else self.hidden_size / self.base_width


class EncoderSection(TransformerSection):
    """The shape of an encoder."""

    same_function: ClassVar[tuple[str, ...]] = (*TransformerSection.same_function, "pre_layer_norm")
    position_offset: ClassVar[int] = 0
    """Row of the position table that holds position 0."""
    embedding_norm: ClassVar[bool] = True
    """LayerNorm after the embeddings."""
    ranked: ClassVar[bool] = False
    """Positions see none of a higher rank (a field `ranks` [b, s])."""

    pre_layer_norm: bool = False
    """LayerNorm before each block instead of after; true is not the published model and cannot be exported."""

    @property
    def num_token_types(self) -> int:
        """Rows of the token-type table; 0 for no table."""
        return 0

    @property
    def table_width(self) -> int | None:
        """Width of the tables, which a matrix maps to the width of the blocks; None for tables of that width."""
        return None


def dropout_problems(section: Any, *names: str) -> Iterator[Problem]:
    """Yield a dropout of 1, of the settings `names` or else of all that end in `dropout`."""
    for name in names or [name for name in type(section).model_fields if name.endswith("dropout")]:
        if getattr(section, name) >= 1.0:
            yield Problem(f"model.{name}", "1 drops everything; expected below 1 (0.1 as published)")


def head_problems(model: ModelSection, prefix: str = "") -> Iterator[Problem]:
    """Yield a problem if the heads do not divide the width; `prefix` begins the names of the settings."""
    heads, width = getattr(model, f"{prefix}num_attention_heads"), getattr(model, f"{prefix}hidden_size")
    if width % heads:
        text = f"{heads} does not divide model.{prefix}hidden_size {width}; {nearest_divisor(width, heads)} does"
        yield Problem(f"model.{prefix}num_attention_heads", text, (f"model.{prefix}hidden_size",))


def rotary_problems(model: TransformerSection) -> Iterator[Problem]:
    """Yield a problem if heads have an odd size, whose elements rotary positions cannot turn in pairs."""
    size, remainder = divmod(model.hidden_size, model.num_attention_heads)
    if size % 2 and not remainder:
        text = (
            f"{model.num_attention_heads} makes heads of {size} elements, but rotary positions turn pairs of them; "
            "choose another number of heads, so that hidden_size / num_attention_heads is even"
        )
        yield Problem("model.num_attention_heads", text, ("model.hidden_size",))


def split_problems(model: HeadsSection, size: int, prefix: str = "") -> Iterator[Problem]:
    """Yield reasons why `size` ranks cannot split the layers; `prefix` begins the names of the settings."""
    shared, dropout = model.shared_heads, model.inner_dropout
    setting, inner = f"{prefix}num_attention_heads", getattr(model, f"{prefix}intermediate_size")
    heads = getattr(model, shared or setting) or getattr(model, setting)
    lanes = DROPOUT_LANES if dropout and getattr(model, dropout) > 0.0 else 1
    even = (ranks for ranks in range(1, heads + 1) if heads % ranks == 0 == inner % ranks)
    fitting = f"{listed(str(ranks) for ranks in even if ranks == 1 or inner // ranks % lanes == 0)} would do"
    path, width = "parallel.tensor_parallel_size", f"model.{prefix}intermediate_size"
    if heads % size:
        twice = ", none of them twice" if shared else ""
        text = (
            f"{size} does not divide model.{shared or setting} {heads}, and every rank holds complete heads{twice}; "
            f"{fitting}"
        )
        yield Problem(path, text, (f"model.{shared or setting}", f"model.{setting}"))
    if inner % size:
        text = f"{size} does not divide {width} {inner}, whose rows the ranks share; {fitting}"
        yield Problem(path, text, (width,))
    elif inner // size % lanes:
        text = (
            f"{size} gives each rank {inner // size} of {width} {inner}, and dropout is "
            f"drawn for {DROPOUT_LANES} of them together; {fitting}, or model.{dropout} 0"
        )
        yield Problem(path, text, (width, f"model.{dropout}"))


def exchange_problems(model: HeadsSection, size: int, tensor: int, prefix: str = "") -> Iterator[Problem]:
    """Yield a problem if `size` ranks cannot exchange positions for heads; the arguments are those of split_problems.

    Each has the heads of one of `tensor` ranks. Of fewer heads of keys and values than ranks, several get the same.
    """
    setting, shared = f"{prefix}num_attention_heads", model.shared_heads
    heads = getattr(model, setting) // tensor
    keys = (getattr(model, shared) or getattr(model, setting)) // tensor if shared else heads

    def exchanges(ranks: int) -> bool:
        return heads % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)

    if heads and keys and not exchanges(size):
        fitting = listed(str(ranks) for ranks in range(1, heads + 1) if exchanges(ranks))
        of = f" / parallel.tensor_parallel_size {tensor}" if tensor > 1 else ""
        also = f" and fit model.{shared} {getattr(model, shared)}" if shared and keys < heads else ""
        text = (
            f"{size} does not divide model.{setting} {getattr(model, setting)}{of}{also}: attention exchanges the "
            f"positions of a row for heads; {fitting} would do"
        )
        yield Problem("parallel.context_parallel_size", text, (f"model.{setting}", "parallel.tensor_parallel_size"))


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of `number` that is nearest to `wanted`."""
    near = (candidate for distance in range(number + wanted) for candidate in (wanted - distance, wanted + distance))
    return next(candidate for candidate in near if candidate > 0 and number % candidate == 0)
