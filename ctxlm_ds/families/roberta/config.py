"""RoBERTa's settings (Liu 2019)."""

from __future__ import annotations

from typing import Any, ClassVar

from ctxlm_ds.families.base import Family, TransformerSection


class RobertaSection(TransformerSection):
    """RoBERTa: an encoder without token types, pooler and next-sentence head; positions start at 2."""

    same_function: ClassVar[tuple[str, ...]] = (*TransformerSection.same_function, "pre_layer_norm")
    double_separator: ClassVar[bool] = True
    """Positions start after the padding id, 1; rows 0 and 1 of the table are never used."""

    family: str = "roberta"
    pre_layer_norm: bool = False
    """LayerNorm before each block instead of after; true is not the published model and cannot be exported."""


def tiny() -> dict[str, Any]:
    """Return the sections of a recipe small enough for tests."""
    return {
        "model": {
            "family": "roberta", "hidden_size": 32, "num_layers": 4, "num_attention_heads": 4,
            "intermediate_size": 64, "max_position_embeddings": 64, "layer_norm_eps": 1e-5,
        },
        "objective": {"name": "masked_lm"},
        "data": {"sample_format": "full_sentences", "seq_length": 32},
    }  # fmt: skip


ROBERTA = Family(
    name="roberta",
    title="RoBERTa (Liu 2019)",
    section=RobertaSection,
    layers="ctxlm_ds.families.roberta.layers:roberta_layers",
    export="ctxlm_ds.families.roberta.export:EXPORT",
    outputs=frozenset({"predicted_logits"}),
    objective="masked_lm",
    sample_format="full_sentences",
    tokenizer="bpe",
    tiny=tiny,
    vocab_size=50_265,
)
