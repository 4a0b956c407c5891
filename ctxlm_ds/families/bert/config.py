"""BERT's settings (Devlin 2018)."""

from __future__ import annotations

from collections.abc import Iterator

from ctxlm_ds.families.base import EncoderSection, Family, tiny_transformer
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, SmallInt
from ctxlm_ds.registry import FORMATS


class BertSection(EncoderSection):
    """BERT: an encoder with token types, a pooler and a next-sentence head."""

    family: str = "bert"
    type_vocab_size: SmallInt = 2
    """Number of token types."""

    def row_problems(self, data: DataSection) -> Iterator[Problem]:
        yield from super().row_problems(data)
        if self.type_vocab_size < 2 and FORMATS.get(data.sample_format).makes_pairs:
            yield Problem(
                "model.type_vocab_size",
                f"{self.type_vocab_size} cannot distinguish the two segments of {data.sample_format}; set it to 2",
                ("data.sample_format", "model.family"),
            )


BERT = Family(
    name="bert",
    title="BERT (Devlin 2018)",
    section=BertSection,
    layers="ctxlm_ds.families.bert.layers:bert_layers",
    export="ctxlm_ds.families.bert.export:EXPORT",
    outputs=frozenset({"predicted_logits", "sentence_logits", "boundary_logits"}),
    objective="masked_lm_nsp",
    sample_format="segment_pair",
    tokenizer="wordpiece",
    tiny=lambda: tiny_transformer("bert", "masked_lm_nsp", "segment_pair"),
    vocab_size=30_522,
)
