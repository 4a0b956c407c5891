"""TinyBERT's settings (Jiao 2020)."""

from __future__ import annotations

from ctxlm_ds.families.base import Family, tiny_transformer
from ctxlm_ds.families.bert.config import BERT, BertSection
from ctxlm_ds.recipe.sections import SmallInt, Width

LAST_HIDDEN, PROJECTED, CLASSES = "hidden_states.-1", "projected_states", "class_logits"


class TinyBertSection(BertSection):
    """TinyBERT: a small BERT, and a projection of its hidden states to the width of a teacher's."""

    family: str = "tinybert"
    fit_size: Width = 768
    """Width of the teacher's hidden states, to which one matrix maps those of every layer."""
    num_classes: SmallInt = 2
    """Classes of the task that a fine-tuned teacher was trained for."""


TINYBERT = Family(
    name="tinybert",
    title="TinyBERT (Jiao 2020)",
    section=TinyBertSection,
    layers="ctxlm_ds.families.tinybert.layers:tinybert_layers",
    export="ctxlm_ds.families.tinybert.export:EXPORT",
    outputs=frozenset({"predicted_logits", LAST_HIDDEN, PROJECTED, CLASSES}),
    objective="tinybert",
    sample_format="segment_pair",
    tokenizer="wordpiece",
    tiny=lambda: tiny_transformer("tinybert", "masked_lm", "segment_pair", fit_size=32),
    vocab_size=BERT.vocab_size,
)
