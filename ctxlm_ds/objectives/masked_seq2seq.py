"""Masked sequence-to-sequence: the decoder writes a span that the input lacks (Song 2019, arXiv:1905.02450)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field as Setting

from ctxlm_ds.data.fields import FITS, IGNORE_LABEL
from ctxlm_ds.objectives.base import share_problems
from ctxlm_ds.objectives.encoder_decoder import (
    DECODER_FIELDS,
    LABELS,
    EncoderDecoder,
    EncoderDecoderSection,
    target_term,
)  # fmt: skip
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, Probability, Width

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ctxlm_ds.data.sample import Samples, TargetExample
    from ctxlm_ds.objectives.base import Arrays
    from ctxlm_ds.tokenizers.base import Tokenizer


class MaskedSeq2SeqSection(EncoderDecoderSection):
    """A span of each text is masked, and the decoder writes it (MASS)."""

    name: str = "masked_seq2seq"
    mask_ratio: Annotated[float, Setting(gt=0.0, le=1.0)] = 0.5
    """Share of a text in its span, rounded down (MASS 0.5)."""
    block_size: Width | None = None
    """Tokens of the parts of a text that each have a span (64 in MASS's code for summaries); null: the text (paper)."""
    keep_prob: Probability = 0.1
    """Share of the masked tokens left as they are."""
    random_prob: Probability = 0.1
    """Share of the masked tokens replaced by a random one; the rest becomes the mask token."""

    @property
    def idle_settings(self) -> tuple[str, ...]:
        return ("decoder_start",)

    def target_length(self, data: DataSection) -> int:
        """Return the most masked tokens of a row."""
        return min(data.seq_length, int(data.seq_length * self.mask_ratio) + data.sequences_per_row)

    def problems(self, data: DataSection) -> Iterator[Problem]:
        yield from super().problems(data)
        yield from share_problems(self.keep_prob, self.random_prob)
        if data.seq_length < 2:
            yield Problem("data.seq_length", f"{data.seq_length}: the first token of a text is never masked; set 2")
        if self.block_size is not None and self.block_size * self.mask_ratio < 1.0:
            yield Problem(
                "objective.block_size",
                f"{self.block_size} x objective.mask_ratio {self.mask_ratio:g} is below the one token masked in each "
                "part; raise one of them, or set null",
                ("objective.mask_ratio",),
            )


class SpanExamples(NamedTuple):
    """TargetExamples with what the decoder reads, and the place of each target in its text."""

    input_ids: NDArray[np.int32]  # [t]
    starts: NDArray[np.int64]  # [c + 1]
    target_ids: NDArray[np.int32]  # [q]
    target_starts: NDArray[np.int64]  # [c + 1]
    previous_ids: NDArray[np.int32]  # [q], the token before each target, which the encoder may not see
    places: NDArray[np.int32]  # [q]

    def example(self, number: int) -> TargetExample:
        from ctxlm_ds.data.sample import TargetExamples

        return TargetExamples(self.input_ids, self.starts, self.target_ids, self.target_starts).example(number)


class MaskedSeq2Seq(EncoderDecoder):
    """The objective of MASS.

    The decoder reads the token before each token that it writes, at the positions of the text.
    """

    section = MaskedSeq2SeqSection
    target_tokens = None
    why_no_text = "has a decoder that writes masked tokens at their places only, each from the text's token before it"
    terms = (target_term("masked_seq2seq"),)
    config: MaskedSeq2SeqSection

    def __init__(self, section: MaskedSeq2SeqSection, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(section, tokenizer)
        if tokenizer is not None:
            from ctxlm_ds.objectives.corruption.spans import SpanRules
            from ctxlm_ds.objectives.corruption.tokens import text_ids

            self._rules = SpanRules(
                section.mask_ratio, section.block_size or 1 << 30, section.keep_prob, section.random_prob,
                tokenizer.mask_id, text_ids(tokenizer),
            )  # fmt: skip

    @property
    def generation_settings(self) -> dict[str, int]:
        """Return nothing: the decoder reads the text before a span, and no start token."""
        return {}

    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> Any:
        import numpy as np

        from ctxlm_ds.data.sample import starts_of
        from ctxlm_ds.objectives.corruption.spans import mask_spans

        ids, masked = np.empty_like(samples.input_ids), np.empty(len(samples.input_ids), dtype=np.bool_)
        mask_spans(samples, key, self._rules, ids, masked)
        places = np.flatnonzero(masked)
        owners = np.searchsorted(samples.starts, places, side="right") - 1
        return SpanExamples(
            input_ids=ids,
            starts=samples.starts,
            target_ids=samples.input_ids[places],
            target_starts=starts_of(np.bincount(owners, minlength=len(samples.keys))),
            previous_ids=samples.input_ids[places - 1],
            places=(places - samples.starts[owners]).astype(np.int32),
        )

    def fill(self, examples: Any, row_starts: NDArray[np.int64], arrays: Arrays) -> int:
        row = super().fill(examples, row_starts, arrays)
        if row == FITS:
            written = arrays[LABELS] != IGNORE_LABEL
            rows = slice(examples.target_starts[row_starts[0]], examples.target_starts[row_starts[-1]])
            arrays[DECODER_FIELDS[0]][written] = examples.previous_ids[rows]
            arrays[DECODER_FIELDS[1]][written] = examples.places[rows]
        return row
