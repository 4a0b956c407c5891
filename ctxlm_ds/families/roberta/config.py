"""Settings of RoBERTa (Liu 2019) and XLM-R (Conneau 2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from ctxlm_ds.families.base import EncoderSection, Family, tiny_transformer


class RobertaSection(EncoderSection):
    """RoBERTa: an encoder without token types, pooler and next-sentence head; positions start at 2."""

    double_separator: ClassVar[bool] = True
    position_offset: ClassVar[int] = 2
    """Positions begin after the padding id, 1; rows 0 and 1 of the table are never used."""

    family: str = "roberta"


ROBERTA = Family(
    name="roberta",
    title="RoBERTa (Liu 2019)",
    section=RobertaSection,
    layers="ctxlm_ds.models.parts.encoder:encoder_layers",
    export="ctxlm_ds.families.roberta.export:EXPORT",
    outputs=frozenset({"predicted_logits", "boundary_logits"}),
    objective="masked_lm",
    sample_format="full_sentences",
    tokenizer="bpe",
    tiny=lambda: tiny_transformer("roberta", "masked_lm", "full_sentences", layer_norm_eps=1e-5),
    vocab_size=50_265,
)


class XlmRobertaSection(RobertaSection):
    """XLM-R: RoBERTa's encoder over sentencepiece's ids."""

    family: str = "xlm_roberta"


XLM_ROBERTA = replace(
    ROBERTA,
    name="xlm_roberta",
    title="XLM-R (Conneau 2020)",
    section=XlmRobertaSection,
    export="ctxlm_ds.families.roberta.export:XLM_ROBERTA_EXPORT",
    tokenizer="unigram",
    tiny=lambda: tiny_transformer("xlm_roberta", "masked_lm", "full_sentences", layer_norm_eps=1e-5),
    vocab_size=250_002,
)
