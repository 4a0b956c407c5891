"""ALBERT's settings (Lan 2020)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from ctxlm_ds.families.base import EncoderSection, Family, tiny_transformer
from ctxlm_ds.families.bert.config import BertSection
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import SmallInt, Width


class AlbertSection(BertSection):
    """ALBERT: an encoder with a factorised word table, whose layers share their weights."""

    same_function: ClassVar[tuple[str, ...]] = (*EncoderSection.same_function, "num_layers", "num_groups")

    family: str = "albert"
    embedding_size: Width = 128
    """Width of the word, position and token type tables; one matrix maps it to hidden_size."""
    num_groups: SmallInt = 1
    """Groups of layers; the layers of a group share one set of weights."""
    layers_per_group: SmallInt = 1
    """Layers with separate weights in a group; each of num_layers steps runs them one after the other."""
    hidden_activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu_tanh"
    """Activation of the feed-forward layer; `gelu_tanh` as published."""
    initializer: Literal["normal", "truncated_normal"] = "truncated_normal"
    """Distribution of the initial weights; `truncated_normal` has none beyond two deviations, as published."""

    @property
    def table_width(self) -> int | None:
        return self.embedding_size

    @property
    def num_blocks(self) -> int:
        return self.num_layers * self.layers_per_group

    @property
    def num_distinct_blocks(self) -> int:
        return self.num_groups * self.layers_per_group

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.num_layers % self.num_groups:
            text = (
                f"{self.num_groups} does not divide model.num_layers {self.num_layers}, so that groups would have "
                "different numbers of layers; set it to 1 as published"
            )
            yield Problem("model.num_groups", text, ("model.num_layers",))


ALBERT = Family(
    name="albert",
    title="ALBERT (Lan 2020)",
    section=AlbertSection,
    layers="ctxlm_ds.families.albert.layers:albert_layers",
    export="ctxlm_ds.families.albert.export:EXPORT",
    outputs=frozenset({"predicted_logits", "sentence_logits", "boundary_logits"}),
    objective="masked_lm_sop",
    sample_format="sentence_order",
    tokenizer="albert",
    tiny=lambda: tiny_transformer(
        "albert", "masked_lm_sop", "sentence_order",
        embedding_size=16, num_groups=2, layers_per_group=2, initializer_range=0.05,
    ),
    vocab_size=30_000,
)  # fmt: skip
