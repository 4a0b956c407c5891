"""XLM-R's settings (Conneau 2020): RoBERTa's, with a sentencepiece vocabulary of many languages."""

from __future__ import annotations

from ctxlm_ds.families.base import Family, tiny_transformer
from ctxlm_ds.families.roberta.config import RobertaSection


class XlmRobertaSection(RobertaSection):
    """XLM-R: RoBERTa's encoder over sentencepiece's ids."""

    family: str = "xlm_roberta"


XLM_ROBERTA = Family(
    name="xlm_roberta",
    title="XLM-R (Conneau 2020)",
    section=XlmRobertaSection,
    layers="ctxlm_ds.families.roberta.layers:roberta_layers",
    export="ctxlm_ds.families.xlm_roberta.export:EXPORT",
    outputs=frozenset({"predicted_logits", "boundary_logits"}),
    objective="masked_lm",
    sample_format="full_sentences",
    tokenizer="unigram",
    tiny=lambda: tiny_transformer("xlm_roberta", "masked_lm", "full_sentences", layer_norm_eps=1e-5),
    vocab_size=250_002,
)
