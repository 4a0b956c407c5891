"""DistilBERT's settings (Sanh 2019)."""

from __future__ import annotations

from ctxlm_ds.families.base import EncoderSection, Family, tiny_transformer
from ctxlm_ds.recipe.sections import SmallInt


class DistilbertSection(EncoderSection):
    """DistilBERT: BERT's encoder with half of the layers, without token types and pooler."""

    family: str = "distilbert"
    num_layers: SmallInt = 6
    """Number of transformer layers (half of the teacher's)."""


DISTILBERT = Family(
    name="distilbert",
    title="DistilBERT (Sanh 2019)",
    section=DistilbertSection,
    layers="ctxlm_ds.models.parts.encoder:encoder_layers",
    export="ctxlm_ds.families.distilbert.export:EXPORT",
    outputs=frozenset({"predicted_logits", "boundary_logits"}),
    objective="masked_lm",
    sample_format="full_sentences",
    tokenizer="wordpiece",
    tiny=lambda: tiny_transformer("distilbert", "masked_lm", "full_sentences"),
    vocab_size=30_522,
)
