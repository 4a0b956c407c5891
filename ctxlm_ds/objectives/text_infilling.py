"""Text infilling with the other noise of BART and mBART: the decoder writes the complete text in its order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field as Setting

from ctxlm_ds.data.fields import FITS, IGNORE_LABEL, Field
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import LossTerm
from ctxlm_ds.objectives.encoder_decoder import (
    FRAME,
    LABELS,
    EncoderDecoder,
    EncoderDecoderSection,
    longest_target,
    target_term,
)
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, Probability

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ctxlm_ds.data.sample import Samples, TargetExamples
    from ctxlm_ds.objectives.base import Arrays
    from ctxlm_ds.objectives.corruption.infilling import InfillingRules
    from ctxlm_ds.tokenizers.base import Tokenizer

REPLACED = LossTerm("replaced", ("decoder_logits",), ("replaced_labels",), weight=0.0)
SHORTEST_MEAN, LONGEST_MEAN = 0.1, 16.0
"""Of span_lambda. Lengths are drawn until one is above 0, about 10 times at the shortest mean."""


class TextInfillingSection(EncoderDecoderSection):
    """Replaced spans, permuted sentences and further noise; the decoder writes the complete text (BART, mBART)."""

    name: str = "text_infilling"
    decoder_start: Literal["pad", "sep"] = "sep"
    """Token that the decoder reads first: `pad` (T5), or `sep`, the end of a text (BART); with language_tokens it is
    the language."""
    mask_ratio: Probability = 0.3
    """Share of the words in spans (BART 0.3, mBART 0.35)."""
    span_lambda: Annotated[float, Setting(ge=SHORTEST_MEAN, le=LONGEST_MEAN)] | None = 3.0
    """Mean of the Poisson lengths of spans in words; null: each span is one word (masking and deletion of tokens)."""
    whole_word: bool = True
    """Spans are of whole words (of WordPiece, byte-level BPE and sentencepiece); false: of tokens."""
    token_languages: tuple[str, ...] = ()
    """Languages that are written without blanks, whose spans are of tokens (fairseq: --no-whole-word-mask-langs)."""
    replace_length: Annotated[int, Setting(ge=-1, le=1)] = 1
    """1: a span becomes one mask; 0: it is deleted; -1: each of its tokens becomes a mask."""
    random_ratio: Probability = 0.1
    """Share of the masks that are random tokens instead."""
    permute_ratio: Probability = 1.0
    """Share of the sentences that change places among each other."""
    sentence_end: str | None = "."
    """Token that ends a sentence, for permute_ratio; null: the separator (data.separate_sentences; mBART)."""
    insert_ratio: Probability = 0.0
    """Inserted masks and random tokens, as a share of the input."""
    rotate_prob: Probability = 0.0
    """Share of the texts that begin at a random token, what is before it moved to the end."""
    language_tokens: bool = False
    """Write `text </s> en_XX` in place of `<s> text </s>`, with the language of the source (mBART)."""
    reports_replaced: bool = False
    """Also report loss and accuracy of the tokens of spans, which the input lacks (`replaced`); the loss then takes the
    logits of all positions together."""

    @property
    def idle_settings(self) -> tuple[str, ...]:
        spans = ("span_lambda", "whole_word", "replace_length", "reports_replaced")
        return (
            *(spans if self.mask_ratio == 0.0 else ()),
            *(() if self.mask_ratio or self.insert_ratio else ("random_ratio",)),
            *(("sentence_end",) if self.permute_ratio == 0.0 else ()),
            *(("decoder_start",) if self.language_tokens else ("token_languages",)),
        )

    @property
    def needs_languages(self) -> bool:
        return self.language_tokens

    def target_length(self, data: DataSection) -> int:
        return longest_target(data.seq_length, self.insert_ratio)

    def sample_length(self, data: DataSection) -> int:
        return self.target_length(data) - (int(data.may_lack_end) if data.frames else FRAME)

    def problems(self, data: DataSection) -> Iterator[Problem]:
        yield from super().problems(data)
        noise = ("mask_ratio", "permute_ratio", "insert_ratio", "rotate_prob")
        if not any(getattr(self, name) for name in noise):
            text = f"0, as are {', '.join(noise[1:])}: the decoder would copy its input; 0.3 as published"
            yield Problem("objective.mask_ratio", text, tuple(f"objective.{name}" for name in noise[1:]))
        is_separated = getattr(data, "separate_sentences", True)
        if self.sentence_end is None and self.permute_ratio > 0.0 and not is_separated:
            text = (
                "null, the separator, but data.separate_sentences is false; set that to true, name the token that ends "
                "sentences, or set objective.permute_ratio to 0"
            )
            yield Problem("objective.sentence_end", text, ("data.separate_sentences", "objective.permute_ratio"))
        if self.sample_length(data) <= FRAME:
            text = f"{data.seq_length} leaves no room for text next to {FRAME} special tokens; set more"
            yield Problem("data.seq_length", text, ("objective.insert_ratio",))
        yield from self.packing_problems(data, "the masks that it inserts into")


class TextInfilling(EncoderDecoder):
    """The objective of BART (Lewis 2020, section 2.2) and mBART (Liu 2020, section 2.2)."""

    section = TextInfillingSection
    terms: tuple[LossTerm, ...] = (target_term("text_infilling"),)
    config: TextInfillingSection

    def __init__(self, section: TextInfillingSection, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(section, tokenizer)
        if section.reports_replaced:
            self.terms = (*self.terms, REPLACED)
        if tokenizer is not None:
            self._rules = infilling_rules(section, tokenizer)

    def fields(self, data: DataSection) -> tuple[Field, ...]:
        length = self.config.target_positions(data)
        reported = Field(REPLACED.labels[0], length, IGNORE_LABEL, shared="positions")
        return (*super().fields(data), *((reported,) if self.config.reports_replaced else ()))

    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> TargetExamples:
        from ctxlm_ds.data.sample import NO_LANGUAGE
        from ctxlm_ds.objectives.corruption.infilling import corrupt

        if self.config.language_tokens and NO_LANGUAGE in samples.language_ids:
            raise ConfigError(
                "objective.language_tokens: a source of these rows names no language; write data.train as "
                "[{path: PREFIX, language: en_XX}, ...]"
            )
        return corrupt(samples, key, budgets, self._rules)

    @property
    def generation_settings(self) -> dict[str, int]:
        """Return the start token and <s>, with which every target begins; nothing with languages, which differ."""
        if self.config.language_tokens:
            return {}
        return super().generation_settings | {"forced_bos_token_id": self._rules.cls_id}

    def input_row(self, ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
        return [tokenizer.cls_id, *ids, tokenizer.sep_id]

    def start_ids(self, examples: TargetExamples) -> int | NDArray[np.int32]:
        """Return `decoder_start`, or with languages the last token of each target [c] (mBART)."""
        if self.config.language_tokens:
            return examples.target_ids[examples.target_starts[1:] - 1]
        return super().start_ids(examples)

    def restored(self, fields: Arrays) -> NDArray[np.bool_]:
        """Return [b, t]: True for labels of spans with `reports_replaced`, without it for all that are text."""
        if not self.config.reports_replaced:
            return super().restored(fields)
        return fields[REPLACED.labels[0]] != IGNORE_LABEL

    def fill(self, examples: TargetExamples, row_starts: NDArray[np.int64], arrays: Arrays) -> int:
        import numpy as np

        row = super().fill(examples, row_starts, arrays)
        if row == FITS and self.config.reports_replaced:
            labels = arrays[LABELS]
            inside = labels != IGNORE_LABEL
            arrays[REPLACED.labels[0]][inside] = np.where(examples.replaced, labels[inside], IGNORE_LABEL)
        return row


def infilling_rules(section: TextInfillingSection, tokenizer: Tokenizer) -> InfillingRules:
    """Return the rules of a section for a tokenizer.

    Raises:
        ConfigError: the tokenizer lacks the token that ends sentences, or has only special tokens.
        TokenizerError: it has no mask, or how it marks words is not known.
    """
    import numpy as np

    from ctxlm_ds.objectives.corruption.infilling import InfillingRules, poisson_ends
    from ctxlm_ds.objectives.corruption.tokens import text_ids

    end = tokenizer.sep_id if section.sentence_end is None else tokenizer.token_to_id(section.sentence_end)
    if end is None and section.permute_ratio > 0.0:
        raise ConfigError(
            f"objective.sentence_end: the tokenizer has no token {section.sentence_end}; name one that ends sentences, "
            "or null for separators (data.separate_sentences: true)"
        )
    known = [name for name in section.token_languages if tokenizer.token_to_id(name) is not None]
    return InfillingRules(
        mask_ratio=section.mask_ratio,
        length_ends=np.empty(0) if section.span_lambda is None else poisson_ends(section.span_lambda),
        replace_length=section.replace_length,
        random_ratio=section.random_ratio,
        permute_ratio=section.permute_ratio,
        insert_ratio=section.insert_ratio,
        rotate_prob=section.rotate_prob,
        sentence_end=-1 if end is None else end,
        cls_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
        mask_id=tokenizer.mask_id,
        random_ids=text_ids(tokenizer),
        token_languages=np.array([tokenizer.token_to_id(name) for name in known], dtype=np.int32),
        word_starts=tokenizer.word_start_mask() if section.whole_word else np.empty(0, dtype=np.bool_),
    )
