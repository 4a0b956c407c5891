"""XLNet's settings (Yang 2019, arXiv:1906.08237)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ctxlm_ds.families.base import (
    Family,
    HeadsSection,
    TransformerSection,
    dropout_problems,
    head_problems,
    tiny_transformer,
)
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, ModelSection, PositiveFraction, Probability, SmallInt, Width


class XlnetSection(HeadsSection):
    """XLNet: two streams with one set of weights, relative positions, and states of the row before."""

    learned_positions: ClassVar[bool] = False
    same_function: ClassVar[tuple[str, ...]] = TransformerSection.same_function
    inner_dropout: ClassVar[str | None] = "hidden_dropout"

    family: str = "xlnet"
    hidden_size: Width = 768
    """Width of the residual stream (d_model)."""
    num_layers: SmallInt = 12
    """Number of layers."""
    num_attention_heads: SmallInt = 12
    """Attention heads; must divide hidden_size."""
    intermediate_size: Width = 3072
    """Width of the feed-forward layer (d_inner)."""
    hidden_activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu_tanh"
    """Activation of the feed-forward layer; `gelu_tanh` as published, `gelu` in transformers' files."""
    layer_norm_eps: PositiveFraction = 1e-12
    """Epsilon of every LayerNorm."""
    hidden_dropout: Probability = 0.1
    """Dropout on words, relative positions, inside feed-forward layers, on each part's output and on the last."""
    attention_dropout: Probability = 0.1
    """Dropout on attention probabilities."""
    initializer_range: PositiveFraction = 0.02
    """Standard deviation of the initial weights."""
    mem_len: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Positions of earlier rows whose states each layer attends to, carried from step to step; needs rows that continue
    (data.sample_format `text_and_pair`)."""

    def problems(self) -> Iterator[Problem]:
        yield from head_problems(self)
        yield from dropout_problems(self)
        if self.hidden_size % 2:
            text = f"{self.hidden_size} is odd, but positions are pairs of a sine and a cosine; set an even width"
            yield Problem("model.hidden_size", text)

    def row_problems(self, data: DataSection) -> Iterator[Problem]:
        if self.mem_len and not data.in_lanes:
            text = (
                f"{self.mem_len}: rows of data.sample_format {data.sample_format} do not continue each other, so there "
                "is nothing to remember; set 0, or the format to text_and_pair"
            )
            yield Problem("model.mem_len", text, ("data.sample_format",))

    context_parallel_problems = ModelSection.context_parallel_problems


XLNET = Family(
    name="xlnet",
    title="XLNet (Yang 2019)",
    section=XlnetSection,
    layers="ctxlm_ds.families.xlnet.layers:xlnet_layers",
    export="ctxlm_ds.families.xlnet.export:EXPORT",
    outputs=frozenset({"permuted_logits"}),
    objective="permutation_lm",
    sample_format="text_and_pair",
    tokenizer="xlnet",
    tiny=lambda: tiny_transformer(
        "xlnet", "permutation_lm", "text_and_pair", max_position_embeddings=None, initializer_range=0.1
    ),
    vocab_size=32_000,
)
