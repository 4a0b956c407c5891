"""ELECTRA's settings (Clark 2020)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ctxlm_ds.families.base import (
    EncoderSection,
    Family,
    exchange_problems,
    head_problems,
    split_problems,
    tiny_transformer,
)
from ctxlm_ds.families.bert.config import BertSection
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import SmallInt, Width

GENERATOR = "generator_"
"""Beginning of the names of the generator's settings."""


class ElectraSection(BertSection):
    """ELECTRA: a small generator that replaces tokens and a discriminator that finds them, with one set of tables."""

    same_function: ClassVar[tuple[str, ...]] = (*EncoderSection.same_function, f"{GENERATOR}num_attention_heads")

    family: str = "electra"
    embedding_size: Width = 768
    """Width of the word, position and token type tables, which generator and discriminator share; a matrix maps it to
    each hidden size that differs."""
    generator_hidden_size: Width = 256
    """Width of the generator's residual stream (small 1/4, base 1/3, large 1/4 of the discriminator's)."""
    generator_num_layers: SmallInt = 12
    """Number of the generator's layers, as many as the discriminator's as published."""
    generator_num_attention_heads: SmallInt = 4
    """The generator's attention heads; must divide generator_hidden_size."""
    generator_intermediate_size: Width = 1024
    """Width of the generator's feed-forward layer."""

    @property
    def generator(self) -> ElectraSection:
        """The section with the generator's sizes in the place of the discriminator's."""
        names = (name for name in type(self).model_fields if name.startswith(GENERATOR))
        return self.model_copy(update={name.removeprefix(GENERATOR): getattr(self, name) for name in names})

    @property
    def table_width(self) -> int | None:
        return None if self.embedding_size == self.hidden_size else self.embedding_size

    @property
    def num_blocks(self) -> int:
        return self.generator_num_layers + self.num_layers

    @property
    def drops(self) -> bool:
        return True  # the generator's samples have keys too

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from head_problems(self, GENERATOR)

    def tensor_parallel_problems(self, size: int) -> Iterator[Problem]:
        yield from super().tensor_parallel_problems(size)
        yield from split_problems(self, size, GENERATOR)

    def context_parallel_problems(self, size: int, tensor: int) -> Iterator[Problem]:
        yield from super().context_parallel_problems(size, tensor)
        yield from exchange_problems(self, size, tensor, GENERATOR)


ELECTRA = Family(
    name="electra",
    title="ELECTRA (Clark 2020)",
    section=ElectraSection,
    layers="ctxlm_ds.families.electra.layers:electra_layers",
    export="ctxlm_ds.families.electra.export:EXPORT",
    outputs=frozenset({"generator_logits", "replaced_logits", "replaced_labels"}),
    objective="replaced_tokens",
    sample_format="doc_segments",
    tokenizer="wordpiece",
    tiny=lambda: tiny_transformer(
        "electra", "replaced_tokens", "doc_sentences", embedding_size=24, generator_hidden_size=16,
        generator_num_layers=2, generator_num_attention_heads=2, generator_intermediate_size=32,
    ),
    vocab_size=30_522,
)  # fmt: skip
