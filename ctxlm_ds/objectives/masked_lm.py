"""Masked language modelling, alone (RoBERTa) or with next-sentence prediction (BERT)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field as Setting

from ctxlm_ds.data.fields import FITS, IGNORE_LABEL, Field
from ctxlm_ds.objectives.base import (
    CLASSIFICATION_SUMS,
    STYLES,
    LossTerm,
    Objective,
    fill_token_fields,
    render_tokens,
    share_problems,
    token_fields,
)
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, ObjectiveSection, PositiveFraction, Probability, SmallInt, Width

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.text import Text

    from ctxlm_ds.data.index.index import RowSource
    from ctxlm_ds.data.sample import Example, Examples, Samples
    from ctxlm_ds.objectives.base import Arrays
    from ctxlm_ds.tokenizers.base import Tokenizer


class MaskingSection(ObjectiveSection):
    """Which tokens are masked."""

    may_mask_nothing: ClassVar[bool] = False
    """True if mask_prob may be 0."""

    mask_prob: Probability = 0.15
    """Share of the tokens to predict."""
    keep_prob: Probability = 0.1
    """Share of the predicted tokens left as they are."""
    random_prob: Probability = 0.1
    """Share of the predicted tokens replaced by a random one; the rest becomes the mask token."""
    random_tokens: Literal["vocabulary", "corpus"] = "vocabulary"
    """What random tokens are drawn from: `vocabulary`, every id equally often (BERT, RoBERTa); `corpus`, the tokens
    of the training text, so that frequent ones come often (SpanBERT)."""
    count_smoothing: Annotated[float, Setting(ge=0.0, le=10.0)] = 0.0
    """Choose tokens with probability proportional to count^-count_smoothing in the training text, rare ones more often
    (XLM; DistilBERT 0.7); 0: all with the same."""
    whole_word: bool = False
    """Choose whole words (of WordPiece and of byte-level BPE)."""
    word_starts: Literal["blank", "albert"] = "blank"
    """Where words of sentencepiece begin: `blank`: at U+2581; `albert`: also at punctuation, `<` and a piece with a
    character outside of a-z (its code)."""
    spans: Literal["none", "geometric", "ngram", "skipgram", "given"] = "none"
    """Choose runs of tokens, or of words with whole_word. `geometric`: lengths by span_prob, up to max_span_length
    (SpanBERT); `ngram`: n with probability proportional to 1/n, up to max_span_length (ALBERT); `skipgram`: with
    span_prob 2 to max_span_length, otherwise 1 (UniLM). `given`: each span of the dataset is chosen as a word is
    (phrases and entities of ERNIE)."""
    max_span_length: SmallInt = 10
    """Longest run (SpanBERT 10, ALBERT and UniLM 3)."""
    span_prob: PositiveFraction = 0.2
    """p of the lengths of `geometric` spans: p(1 - p)^(n - 1), renormalised (SpanBERT 0.2); probability of a
    `skipgram` run, each length equally often (UniLM 0.2)."""
    replace_spans: bool = False
    """Draw mask, random or kept once per run of predicted tokens instead of per token (SpanBERT)."""
    masking: Literal["dynamic", "static"] = "dynamic"
    """`dynamic`: new masks by (seed, epoch, sample); `static`: by (seed, sample)."""
    special_tokens: Literal["never", "bert", "roberta", "distilbert", "spanbert"] = "never"
    """`never`: neither masked nor drawn; `bert`: drawn as random tokens (its code); `roberta`: masked too (fairseq);
    `distilbert`: as `bert`, and an `[UNK]` of the text is not predicted; `spanbert`: as `never`, and an `[UNK]` of the
    text next to a span is a boundary of it."""
    count_rounding: Literal["nearest", "probabilistic", "up"] = "nearest"
    """Number of predictions: round(p·n) (BERT), floor(p·n + U) (fairseq), or ceil(p·n) without counting special tokens
    (SpanBERT); always at least one."""
    max_predictions: Width | None = None
    """Prediction slots in a row; null is ceil(mask_prob·seq_length), plus one for each further packed sequence."""

    @property
    def idle_settings(self) -> tuple[str, ...]:
        words = (*(() if self.whole_word else ("word_starts",)), *(() if self.random_prob else ("random_tokens",)))
        if self.spans in ("none", "given"):
            return *words, "max_span_length", "span_prob"
        return (*words, "span_prob") if self.spans == "ngram" else words

    @property
    def needs_spans(self) -> bool:
        return self.spans == "given"

    def problems(self, data: DataSection) -> Iterator[Problem]:
        yield from share_problems(self.keep_prob, self.random_prob)
        units = self.whole_word or self.spans != "none" or self.special_tokens == "roberta"
        if self.count_smoothing > 0.0 and units:
            yield Problem(
                "objective.count_smoothing",
                f"{self.count_smoothing:g}: only single tokens without special ones have a count; set this to 0, "
                "or objective.whole_word to false, objective.spans to none, objective.special_tokens to another value",
                ("objective.whole_word", "objective.spans", "objective.special_tokens"),
            )
        if not (0.0 < self.mask_prob < 1.0 or (self.may_mask_nothing and self.mask_prob == 0.0)):
            yield Problem("objective.mask_prob", f"{self.mask_prob:g}: expected above 0, below 1 (0.15 as published)")
        if self.max_predictions is not None and self.max_predictions > data.seq_length:
            yield Problem(
                "objective.max_predictions",
                f"{self.max_predictions} is more than a row has positions (data.seq_length {data.seq_length})",
                ("data.seq_length",),
            )
        if self.mask_prob and (self.max_predictions or data.sequences_per_row) < data.sequences_per_row:
            text = (
                f"{self.max_predictions} is less than data.max_sequences_per_row {data.sequences_per_row}; every "
                "packed sequence needs at least one prediction slot: raise the first or lower the second"
            )
            yield Problem("objective.max_predictions", text, ("data.max_sequences_per_row",))


class MaskedLMSection(MaskingSection):
    """Masked tokens (RoBERTa), words, spans (SpanBERT) or n-grams (ALBERT)."""

    name: str = "masked_lm"
    boundary_weight: Annotated[float, Setting(ge=0.0, le=1e6)] = 0.0
    """Weight of the span boundary objective: each predicted token from the two tokens around its run of predicted
    tokens (SpanBERT 1.0); 0 is without it."""


class MaskedLMSentenceOrderSection(MaskedLMSection):
    """Masked tokens and whether two segments are in their order, each with its own mean (ALBERT)."""

    name: str = "masked_lm_sop"


class MaskedLMNextSentenceSection(MaskedLMSection):
    """Masked tokens and whether the second segment follows the first, each with its own mean (BERT)."""

    name: str = "masked_lm_nsp"


def sentence_term(name: str) -> LossTerm:
    """Return the term of a classifier over each sequence's first position."""
    return LossTerm(name, ("sentence_logits",), (f"{name}_labels",), CLASSIFICATION_SUMS)


SPAN_BOUNDARY = LossTerm("span_boundary", ("boundary_logits",), ("boundary_labels",))


class Masking(Objective):
    """An objective whose inputs have masked tokens; corruption/ says which."""

    config: MaskingSection

    def __init__(self, section: MaskingSection, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(section, tokenizer)
        self.config = section
        if tokenizer is not None:
            from ctxlm_ds.objectives.corruption.tokens import choice_of, masking_rules

            self._rules, self._choice = masking_rules(section, tokenizer), choice_of(section)
            self._bounds_rows = self._rules.is_special.copy()
            self._bounds_rows[tokenizer.unk_id] &= section.special_tokens != "spanbert"

    @classmethod
    def is_static(cls, section: Any) -> bool:
        return bool(section.masking == "static")

    def slots(self, data: DataSection) -> int:
        """Return the prediction slots of a row: the setting, or the most that a row can need."""
        return self.config.max_predictions or self._slots_needed(data)

    def _slots_needed(self, data: DataSection) -> int:
        """Return the most predictions of any row: each of its sequences rounds up by less than one."""
        return max(1, math.ceil(self.config.mask_prob * data.seq_length)) + data.sequences_per_row - 1

    def budgets(self, lengths: NDArray[np.int64], data: DataSection) -> NDArray[np.int64]:
        """Return the [n] most predictions of sequences of `lengths`, in any row.

        Alone in a row a sequence may use every slot (BERT's max_predictions_per_seq). If packed rows were given fewer
        slots than they can need, each sequence has one and its share by length of the others.
        """
        import numpy as np

        slots = self.slots(data)
        if not data.shares_rows or slots >= self._slots_needed(data):
            return np.full(len(lengths), slots, dtype=np.int64)
        shared = slots - data.sequences_per_row
        return 1 + shared * np.asarray(lengths, dtype=np.int64) // data.seq_length

    def read_corpus(self, rows: RowSource, seed: int) -> None:
        if self.config.random_tokens == "corpus":
            from ctxlm_ds.objectives.corruption.corpus_tokens import sample_tokens

            self._rules = self._rules._replace(random_ids=sample_tokens(rows, seed, self._rules.is_special))
        if self.config.count_smoothing > 0.0:
            from ctxlm_ds.objectives.corruption.corpus_tokens import choice_weights

            weights = choice_weights(rows, seed, self._rules.is_special, self.config.count_smoothing)
            self._choice = self._choice._replace(weights=weights)

    def for_evaluation(self, mask_prob: float) -> Masking:
        other = copy(self)
        other._rules = self._rules._replace(mask_prob=mask_prob)
        return other

    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> Examples:
        import numpy as np

        from ctxlm_ds.data.sample import Examples
        from ctxlm_ds.objectives.corruption.tokens import mask_samples

        assert len(self._rules.random_ids), "read_corpus comes first"
        assert self._choice.weights is not None or not self.config.count_smoothing, "read_corpus comes first"
        ids = np.empty_like(samples.input_ids)
        positions, labels, starts = mask_samples(samples, key, budgets, self._rules, self._choice, ids)
        return Examples(ids, samples.starts, samples.second_starts, samples.sequence_labels, positions, labels, starts)

    def render(self, example: Example, tokenizer: Tokenizer) -> Text:
        """Return `[CLS] the [MASK→cat] sat`: the input and the token to predict."""
        predicted = {}
        pairs = zip(example.prediction_positions.tolist(), example.prediction_labels.tolist(), strict=True)
        for position, label in pairs:
            token_id = int(example.input_ids[position])
            is_mask = token_id == tokenizer.mask_id
            read = tokenizer.shown(token_id)[1]
            lead, original = tokenizer.shown(label)
            style = STYLES["mask" if is_mask else "kept" if token_id == label else "random"]
            predicted[position] = lead, f"[{read.strip('[]') if is_mask else read}→{original}]", style
        return render_tokens(example.input_ids, tokenizer, predicted)


class MaskedLM(Masking):
    """The objective of RoBERTa and SpanBERT."""

    section: ClassVar[type[MaskedLMSection]] = MaskedLMSection
    outputs: tuple[str, ...] = ("predicted_logits",)
    masked_tokens: ClassVar[str | None] = "predicted_logits"
    terms: tuple[LossTerm, ...] = (LossTerm("masked_lm", ("predicted_logits",), ("masked_lm_labels",)),)
    config: MaskedLMSection

    def __init__(self, section: MaskedLMSection, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(section, tokenizer)
        if section.boundary_weight > 0.0:
            self.outputs = (*self.outputs, *SPAN_BOUNDARY.outputs)
            self.terms = (*self.terms, replace(SPAN_BOUNDARY, weight=section.boundary_weight))

    def fields(self, data: DataSection) -> tuple[Field, ...]:
        slots = self.slots(data)
        boundaries = (
            Field("boundary_positions", 2 * slots, shared="complete"),
            Field("boundary_offsets", slots, shared="complete"),
            Field("boundary_labels", slots, IGNORE_LABEL, shared="slots"),
        )
        return (
            *token_fields(data, self.pad_id),
            Field("token_type_ids", data.seq_length, shared="positions"),
            Field("prediction_positions", slots, shared="complete"),
            Field("masked_lm_labels", slots, IGNORE_LABEL, shared="slots"),
            *(boundaries if self.config.boundary_weight > 0.0 else ()),
        )

    def fill(self, examples: Examples, row_starts: NDArray[np.int64], arrays: Arrays) -> int:
        from ctxlm_ds.data.stream.row_filling import fill_boundaries, fill_slots, fill_token_types

        slots = arrays["prediction_positions"]
        row = fill_token_fields(examples, row_starts, arrays, slots.shape[1])
        if row == FITS:
            fill_token_types(examples, row_starts, arrays["token_type_ids"])
            fill_slots(examples, row_starts, slots, arrays["masked_lm_labels"])
            if "boundary_labels" in arrays:
                boundaries = (arrays[name] for name in ("boundary_positions", "boundary_offsets", "boundary_labels"))
                fill_boundaries(examples, row_starts, self._bounds_rows, *boundaries)
        return row


class MaskedLMNextSentence(MaskedLM):
    """The objective of BERT."""

    section: ClassVar[type[MaskedLMSection]] = MaskedLMNextSentenceSection
    outputs = ("predicted_logits", "sentence_logits")
    sequence_label: ClassVar[str | None] = "next_sentence"
    terms = (*MaskedLM.terms, sentence_term("next_sentence"))

    def fields(self, data: DataSection) -> tuple[Field, ...]:
        sequences = data.sequences_per_row
        return (
            *super().fields(data),
            Field("cls_positions", sequences, shared="complete"),
            Field(f"{self.sequence_label}_labels", sequences, IGNORE_LABEL, shared="slots"),
        )

    def fill(self, examples: Examples, row_starts: NDArray[np.int64], arrays: Arrays) -> int:
        from ctxlm_ds.data.stream.row_filling import fill_sequence_labels, fill_starts

        row = super().fill(examples, row_starts, arrays)
        if row == FITS:
            fill_starts(examples, row_starts, arrays["cls_positions"], False)
            fill_sequence_labels(examples, row_starts, arrays[f"{self.sequence_label}_labels"])
        return row


class MaskedLMSentenceOrder(MaskedLMNextSentence):
    """The objective of ALBERT."""

    section = MaskedLMSentenceOrderSection
    sequence_label = "sentence_order"
    terms = (*MaskedLM.terms, sentence_term("sentence_order"))
