"""Settings of BERT (Devlin 2018), Megatron-LM's BERT, DistilBERT, UniLM and TinyBERT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from ctxlm_ds.families.base import EncoderSection, Family, tiny_transformer
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, PositiveFraction, SmallInt, Width
from ctxlm_ds.registry import FORMATS


class BertSection(EncoderSection):
    """BERT: an encoder with token types, a pooler and a next-sentence head."""

    family: str = "bert"
    type_vocab_size: SmallInt = 2
    """Number of token types."""

    @property
    def num_token_types(self) -> int:
        return self.type_vocab_size

    def row_problems(self, data: DataSection) -> Iterator[Problem]:
        yield from super().row_problems(data)
        if self.type_vocab_size < 2 and FORMATS.get(data.sample_format).makes_pairs:
            text = f"{self.type_vocab_size} cannot distinguish the two segments of {data.sample_format}; set it to 2"
            yield Problem("model.type_vocab_size", text, ("data.sample_format", "model.family"))


BERT = Family(
    name="bert",
    title="BERT (Devlin 2018)",
    section=BertSection,
    layers="ctxlm_ds.models.parts.encoder:encoder_layers",
    export="ctxlm_ds.families.bert.export:EXPORT",
    outputs=frozenset({"predicted_logits", "sentence_logits", "boundary_logits"}),
    objective="masked_lm_nsp",
    sample_format="segment_pair",
    tokenizer="wordpiece",
    tiny=lambda: tiny_transformer("bert", "masked_lm_nsp", "segment_pair"),
    vocab_size=30_522,
)


class MegatronBertSection(BertSection):
    """BERT with LayerNorm before each block and after the last one, and none after the embeddings."""

    embedding_norm: ClassVar[bool] = False

    family: str = "megatron_bert"
    pre_layer_norm: bool = True
    """Megatron-LM's order; `bert` has the published one."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if not self.pre_layer_norm:
            yield Problem(
                "model.pre_layer_norm", "false is not Megatron-LM's BERT; set model.family: bert", ("model.family",)
            )


MEGATRON_BERT = replace(
    BERT,
    name="megatron_bert",
    title="Megatron-LM's BERT (Shoeybi 2019)",
    section=MegatronBertSection,
    export="ctxlm_ds.families.bert.export:MEGATRON_BERT_EXPORT",
    tiny=lambda: tiny_transformer("megatron_bert", "masked_lm_nsp", "segment_pair", layer_norm_eps=1e-5),
)


class DistilbertSection(EncoderSection):
    """DistilBERT: BERT's encoder with half of the layers, without token types and pooler."""

    family: str = "distilbert"
    num_layers: SmallInt = 6
    """Number of transformer layers (half of the teacher's)."""


DISTILBERT = replace(
    BERT,
    name="distilbert",
    title="DistilBERT (Sanh 2019)",
    section=DistilbertSection,
    export="ctxlm_ds.families.bert.export_distilbert:EXPORT",
    outputs=frozenset({"predicted_logits", "boundary_logits"}),
    objective="masked_lm",
    sample_format="full_sentences",
    tiny=lambda: tiny_transformer("distilbert", "masked_lm", "full_sentences"),
)


UNILM_TOKEN_TYPES = 6
"""Two for pairs read in both directions, one for each direction, two for a source and a target."""


class UnilmSection(BertSection):
    """UniLM: BERT whose rows say which positions a position sees."""

    ranked: ClassVar[bool] = True

    family: str = "unilm"
    type_vocab_size: SmallInt = UNILM_TOKEN_TYPES
    """Number of token types, which differ by the kind of language model."""
    layer_norm_eps: PositiveFraction = 1e-5
    """Epsilon of every LayerNorm."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.type_vocab_size != UNILM_TOKEN_TYPES:
            wanted = f"the kinds of language models have {UNILM_TOKEN_TYPES} token types"
            text = f"{self.type_vocab_size}: {wanted}; leave it out"
            yield Problem("model.type_vocab_size", text, ("model.family",))


def _tiny_unilm() -> dict[str, dict[str, object]]:
    tiny = tiny_transformer("unilm", "unified_lm", "segment_pair")
    # Most rows of short texts have one sentence and a random second one.
    shares = {"sequence_to_sequence_prob": 0.2, "left_to_right_prob": 0.25}
    return tiny | {"data": tiny["data"] | {"random_next_prob": 0.0}, "objective": tiny["objective"] | shares}


UNILM = replace(
    BERT,
    name="unilm",
    title="UniLM (Dong 2019)",
    section=UnilmSection,
    export="ctxlm_ds.families.bert.export:UNILM_EXPORT",
    outputs=frozenset({"ranked_logits", "sentence_logits"}),
    objective="unified_lm",
    tiny=_tiny_unilm,
    vocab_size=28_996,
)


LAST_HIDDEN, PROJECTED, CLASSES = "hidden_states.-1", "projected_states", "class_logits"


class TinyBertSection(BertSection):
    """TinyBERT: a small BERT, and a projection of its hidden states to the width of a teacher's."""

    family: str = "tinybert"
    fit_size: Width = 768
    """Width of the teacher's hidden states, to which one matrix maps those of every layer."""
    num_classes: SmallInt = 2
    """Classes of the task that a fine-tuned teacher was trained for."""


TINYBERT = replace(
    BERT,
    name="tinybert",
    title="TinyBERT (Jiao 2020)",
    section=TinyBertSection,
    layers="ctxlm_ds.families.bert.layers:tinybert_layers",
    export="ctxlm_ds.families.bert.export:TINYBERT_EXPORT",
    outputs=frozenset({"predicted_logits", LAST_HIDDEN, PROJECTED, CLASSES}),
    objective="tinybert",
    tiny=lambda: tiny_transformer("tinybert", "masked_lm", "segment_pair", fit_size=32),
)
