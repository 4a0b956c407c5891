"""Unified language modelling: masked tokens, seen from both sides, from one, or by a target that reads a source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from ctxlm_ds.data.fields import FITS, Field
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.masked_lm import MaskedLMNextSentence, MaskedLMNextSentenceSection
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, Probability, SmallInt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.text import Text

    from ctxlm_ds.data.index.index import RowSource
    from ctxlm_ds.data.sample import Example, Examples, Samples
    from ctxlm_ds.objectives.base import Arrays
    from ctxlm_ds.tokenizers.base import Tokenizer

COUNTED_LABELS = 1 << 20
NAMES = ("", "", "left-to-right", "right-to-left", "sequence-to-sequence")
"""Names of kinds by their first token type."""


class UnifiedLMSection(MaskedLMNextSentenceSection):
    """Masked tokens of texts read in both directions, with next-sentence prediction, in one, or as source and target
    (UniLM)."""

    name: str = "unified_lm"
    left_to_right_prob: Probability = 1 / 6
    """Share of the sequences that are read from left to right (UniLM 1/6); those of no other kind are bidirectional."""
    right_to_left_prob: Probability = 1 / 6
    """Share of the sequences that are read from right to left (UniLM 1/6)."""
    sequence_to_sequence_prob: Probability = 1 / 3
    """Share of the sequences whose second segment is a target, read from left to right after the first (UniLM 1/3)."""
    spans: Literal["none", "geometric", "ngram", "skipgram", "given"] = "skipgram"
    """Runs of tokens, or of words with whole_word; `skipgram` as published, the others as in masked_lm."""
    max_span_length: SmallInt = 3
    """Longest run (UniLM 3)."""

    @property
    def bidirectional_share(self) -> float:
        """Share of the bidirectional sequences."""
        return 1.0 - self.left_to_right_prob - self.right_to_left_prob - self.sequence_to_sequence_prob

    def problems(self, data: DataSection) -> Iterator[Problem]:
        yield from super().problems(data)
        names = ("left_to_right_prob", "right_to_left_prob", "sequence_to_sequence_prob")
        if self.bidirectional_share < -1e-9:
            total = 1.0 - self.bidirectional_share
            yield Problem(
                f"objective.{names[2]}",
                f"{self.sequence_to_sequence_prob:g} and the shares of both directions add up to {total:g}, more than "
                "1 (1/3, 1/6 and 1/6 as published)",
                tuple(f"objective.{name}" for name in names[:2]),
            )


class UnifiedExamples(NamedTuple):
    """Examples, and the ranks and token types of their tokens (corruption/kinds.py)."""

    examples: Examples
    ranks: NDArray[np.int32]  # [t]
    types: NDArray[np.int32]  # [t]

    def example(self, number: int) -> Example:
        begin, end = self.examples.starts[number : number + 2].tolist()
        return replace(self.examples.example(number), token_type_ids=self.types[begin:end])


class UnifiedLM(MaskedLMNextSentence):
    """The objective of UniLM; `ranks` [b, s] says what a position sees: those whose rank is not above its own."""

    section = UnifiedLMSection
    outputs = ("ranked_logits", "sentence_logits")
    masked_tokens = "ranked_logits"
    terms = (replace(MaskedLMNextSentence.terms[0], outputs=("ranked_logits",)), *MaskedLMNextSentence.terms[1:])
    config: UnifiedLMSection
    _shares: NDArray[np.float64] | None = None

    def read_corpus(self, rows: RowSource, seed: int) -> None:
        """Count the random pairs, so that each kind has its share for any share of theirs."""
        from ctxlm_ds.objectives.corruption.kinds import kind_shares

        super().read_corpus(rows, seed)
        random = share_of_random_pairs(rows)
        config = self.config
        if random > 1.0 - config.sequence_to_sequence_prob + 1e-6:
            raise ConfigError(
                f"objective.sequence_to_sequence_prob {config.sequence_to_sequence_prob:.3g}: only {1.0 - random:.3f} "
                "of the pairs of data.train follow each other, as a source and its target do; lower it, or set "
                "data.random_next_prob lower or data.seq_length longer (a row of one sentence has a random second one)"
            )
        wanted = (config.left_to_right_prob, config.right_to_left_prob, config.sequence_to_sequence_prob)
        self._shares = kind_shares((max(0.0, config.bidirectional_share), *wanted), random)

    def fields(self, data: DataSection) -> tuple[Field, ...]:
        return (*super().fields(data), Field("ranks", data.seq_length, shared="complete"))

    def corrupt_batch(  # type: ignore[override]
        self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]
    ) -> UnifiedExamples:
        import numpy as np

        from ctxlm_ds.data.sample import NO_LABEL
        from ctxlm_ds.objectives.corruption.kinds import BIDIRECTIONAL, draw_kinds, one_text, rank_tokens

        assert self._shares is not None, "read_corpus comes first"
        kinds = draw_kinds(samples, key, self._shares)
        labels = np.where(kinds == BIDIRECTIONAL, samples.sequence_labels, NO_LABEL).astype(np.int8)
        examples = super().corrupt_batch(one_text(samples, kinds)._replace(sequence_labels=labels), key, budgets)
        return UnifiedExamples(examples, *rank_tokens(examples.starts, examples.second_starts, kinds))

    def fill(  # type: ignore[override]
        self, examples: UnifiedExamples, row_starts: NDArray[np.int64], arrays: Arrays
    ) -> int:
        from ctxlm_ds.data.stream.row_filling import fill_values

        row = super().fill(examples.examples, row_starts, arrays)
        if row == FITS:
            fill_values(examples.examples, row_starts, examples.types, arrays["token_type_ids"])
            fill_values(examples.examples, row_starts, examples.ranks, arrays["ranks"])
        return row

    def render(self, example: Example, tokenizer: Tokenizer) -> Text:
        """Return the kind of another than a bidirectional sequence, and `[CLS] the [MASK→cat] sat`."""
        from rich.text import Text

        kind = NAMES[int(example.token_type_ids[0])]
        return Text(f"{kind}: " if kind else "", style="magenta").append_text(super().render(example, tokenizer))


def share_of_random_pairs(rows: RowSource) -> float:
    """Return the share of pairs with a second segment of another document, of all or of a million spread evenly."""
    step = max(1, sum(len(index.records) for index in rows.indexes) // COUNTED_LABELS)
    labels = [index.records["is_random"][::step] for index in rows.indexes]
    return float(sum(int((some == 1).sum()) for some in labels) / max(1, sum(map(len, labels))))
