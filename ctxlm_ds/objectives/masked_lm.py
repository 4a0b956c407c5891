"""Masked language modelling, alone (RoBERTa) or with next-sentence prediction (BERT)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from ctxlm_ds.objectives.base import CLASSIFICATION_SUMS, LossTerm, Objective
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.section import PositiveInt, Probability
from ctxlm_ds.recipe.sections import DataSection, ObjectiveSection


class MaskedLMSection(ObjectiveSection):
    """Masked tokens (RoBERTa)."""

    name: str = "masked_lm"
    mask_prob: Probability = 0.15
    """Share of the tokens to predict."""
    keep_prob: Probability = 0.1
    """Share of the predicted tokens left as they are."""
    random_prob: Probability = 0.1
    """Share of the predicted tokens replaced by a random one; the rest becomes the mask token."""
    whole_word: bool = False
    """Choose whole words (of WordPiece and of byte-level BPE)."""
    masking: Literal["dynamic", "static"] = "dynamic"
    """`dynamic`: new masks by (seed, epoch, sample); `static`: fixed when the sample index is built."""
    special_tokens: Literal["never", "bert", "roberta"] = "never"
    """`never`: neither masked nor drawn; `bert`: drawn as random tokens (its code); `roberta`: masked too (fairseq)."""
    count_rounding: Literal["nearest", "probabilistic"] = "nearest"
    """Number of predictions: max(1, round(p·n)) (BERT) or floor(p·n + U) (fairseq), at least one either way."""
    max_predictions: PositiveInt | None = None
    """Prediction slots in a row; null is ceil(mask_prob·seq_length), plus one for each further packed sequence."""

    def problems(self, data: DataSection) -> Iterator[Problem]:
        if self.keep_prob + self.random_prob > 1.0:
            yield Problem(
                "objective.random_prob",
                f"{self.random_prob:g} and objective.keep_prob {self.keep_prob:g} add up to more than 1; "
                "what they leave becomes the mask token (0.1 and 0.1 as published)",
                ("objective.keep_prob",),
            )
        if not 0.0 < self.mask_prob < 1.0:
            yield Problem("objective.mask_prob", f"{self.mask_prob:g}: expected above 0, below 1 (0.15 as published)")
        if self.max_predictions is not None and self.max_predictions > data.seq_length:
            yield Problem(
                "objective.max_predictions",
                f"{self.max_predictions} is more than a row has positions (data.seq_length {data.seq_length})",
                ("data.seq_length",),
            )


class MaskedLMNextSentenceSection(MaskedLMSection):
    """Masked tokens and whether the second segment follows the first, each with its own mean (BERT)."""

    name: str = "masked_lm_nsp"


class MaskedLM(Objective):
    """The objective of RoBERTa."""

    name = "masked_lm"
    section: ClassVar[type[MaskedLMSection]] = MaskedLMSection
    outputs = ("predicted_logits",)
    terms = (LossTerm("masked_lm", ("predicted_logits",), ("masked_lm_labels",)),)


class MaskedLMNextSentence(MaskedLM):
    """The objective of BERT."""

    name = "masked_lm_nsp"
    section = MaskedLMNextSentenceSection
    outputs = ("predicted_logits", "sentence_logits")
    terms = (
        *MaskedLM.terms,
        LossTerm("next_sentence", ("sentence_logits",), ("next_sentence_labels",), CLASSIFICATION_SUMS),
    )
    needs_pairs = True
