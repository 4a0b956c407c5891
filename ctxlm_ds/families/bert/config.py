"""BERT's settings (Devlin 2018)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from ctxlm_ds.families.base import Family, TransformerSection
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.section import SmallInt
from ctxlm_ds.recipe.sections import DataSection
from ctxlm_ds.registry import FORMATS


class BertSection(TransformerSection):
    """BERT: an encoder with token types, a pooler and a next-sentence head."""

    same_function: ClassVar[tuple[str, ...]] = (*TransformerSection.same_function, "pre_layer_norm")

    family: str = "bert"
    type_vocab_size: SmallInt = 2
    """Number of token types."""
    pre_layer_norm: bool = False
    """LayerNorm before each block instead of after; true is not the published model and cannot be exported."""

    def row_problems(self, data: DataSection) -> Iterator[Problem]:
        yield from super().row_problems(data)
        if self.type_vocab_size < 2 and FORMATS.get(data.sample_format).makes_pairs:
            yield Problem(
                "model.type_vocab_size",
                f"{self.type_vocab_size} cannot tell the two segments of {data.sample_format} apart; set it to 2",
                ("data.sample_format", "model.family"),
            )


def tiny() -> dict[str, Any]:
    """Return the sections of a recipe small enough for tests."""
    return {
        "model": {
            "family": "bert", "hidden_size": 32, "num_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
            "max_position_embeddings": 64,
        },
        "objective": {"name": "masked_lm_nsp"},
        "data": {"sample_format": "segment_pair", "seq_length": 32},
    }  # fmt: skip


BERT = Family(
    name="bert",
    title="BERT (Devlin 2018)",
    section=BertSection,
    layers="ctxlm_ds.families.bert.layers:bert_layers",
    export="ctxlm_ds.families.bert.export:EXPORT",
    outputs=frozenset({"predicted_logits", "sentence_logits"}),
    objective="masked_lm_nsp",
    sample_format="segment_pair",
    tokenizer="wordpiece",
    tiny=tiny,
    vocab_size=30_522,
)
