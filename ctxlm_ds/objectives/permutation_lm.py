"""Permutation language modelling: some tokens, each from those before it in a random order (Yang 2019)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ctxlm_ds.data.fields import FITS, IGNORE_LABEL, Field
from ctxlm_ds.objectives.base import STYLES, LossTerm, Objective, fill_token_fields, render_tokens, token_fields
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, ObjectiveSection, SmallInt, Width

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.text import Text

    from ctxlm_ds.data.sample import Example, Examples, Samples
    from ctxlm_ds.objectives.base import Arrays
    from ctxlm_ds.tokenizers.base import Tokenizer

LABELS = "permutation_lm_labels"
PUNCTUATION = frozenset('!"#$%&()*+,-./:;?@[\\]^_`{|}~')
"""Tokens that begin a word although no space is before them (data_utils.py, `_is_start_piece`; ALBERT too)."""
CLS_TYPE = 2
"""Segment of the classification token."""


class PermutationLMSection(ObjectiveSection):
    """Some tokens of each half of a row, each predicted from those before it in a random order (XLNet)."""

    name: str = "permutation_lm"
    num_predictions: Width | None = None
    """Tokens to predict in a full row; null is data.seq_length / (context_tokens / predicted_tokens), rounded down (85
    of 512 as published). Chosen special tokens are not predicted."""
    context_tokens: SmallInt = 6
    """Size of the context in which a span of predicted_tokens is predicted (mask_alpha)."""
    predicted_tokens: SmallInt = 1
    """Predicted tokens of a context (mask_beta)."""
    max_span_length: SmallInt = 5
    """Longest span; lengths n have probability proportional to 1/n."""
    perm_size: Width | None = None
    """Tokens of a block of the order; null is half a row (256 of 512 as published)."""

    def slots(self, data: DataSection) -> int:
        """Return the predictions of a full row."""
        wanted = data.seq_length * self.predicted_tokens // self.context_tokens
        return self.num_predictions or max(1, wanted)

    def stack_lengths(self, data: DataSection) -> tuple[int, ...]:
        return (data.seq_length + self.slots(data) + data.sequences_per_row - 1,)

    def problems(self, data: DataSection) -> Iterator[Problem]:
        if self.predicted_tokens > self.context_tokens:
            yield Problem(
                "objective.predicted_tokens",
                f"{self.predicted_tokens} is more than objective.context_tokens {self.context_tokens}; set 1 and 6 as "
                "published",
                ("objective.context_tokens",),
            )
        if self.num_predictions is not None and self.num_predictions > data.seq_length:
            yield Problem(
                "objective.num_predictions",
                f"{self.num_predictions} is more than a row has positions (data.seq_length {data.seq_length})",
                ("data.seq_length",),
            )
        if self.perm_size is not None and self.perm_size > data.seq_length // 2:
            yield Problem(
                "objective.perm_size",
                f"{self.perm_size} is longer than half a row (data.seq_length {data.seq_length}), where an order ends; "
                "set null",
                ("data.seq_length",),
            )


class PermutedExamples(NamedTuple):
    """Examples and the ranks of their tokens (corruption/permutation.py)."""

    examples: Examples
    ranks: NDArray[np.int32]  # [t]

    def example(self, number: int) -> Example:
        return self.examples.example(number)


class PermutationLM(Objective):
    """The objective of XLNet; tokens are not replaced, a second stream predicts them.

    Fields: `ranks` [b, s], above all others at padding; `target_positions` [b, p], the row's length in empty slots;
    `directions` [b, 1], 1 for a row that is read backward; token types are 0 and 1 for segments and 2 for the
    classification token.
    """

    section = PermutationLMSection
    outputs = ("permuted_logits",)
    masked_tokens = "permuted_logits"
    slots_field = "target_positions"
    lane_directions = 1
    terms = (LossTerm("permutation_lm", ("permuted_logits",), (LABELS,)),)

    def __init__(self, section: PermutationLMSection, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(section, tokenizer)
        self.config = section
        self._cls_id = 0 if tokenizer is None else tokenizer.cls_id
        self._has_directions = False  # then the labels of sequences say something else
        if tokenizer is not None:
            from ctxlm_ds.objectives.corruption.permutation import PermutationRules
            from ctxlm_ds.objectives.corruption.spans import ngram_shares

            self._rules = PermutationRules(
                shares=ngram_shares(section.max_span_length),
                context=section.context_tokens,
                predicted=section.predicted_tokens,
                perm_size=section.perm_size or 1 << 30,
                begins_word=word_beginnings(tokenizer),
            )

    def fields(self, data: DataSection) -> tuple[Field, ...]:
        length, slots = data.seq_length, self.config.slots(data) + data.sequences_per_row - 1
        self._has_directions = getattr(data, "both_directions", False)
        return (
            *token_fields(data, self.pad_id),
            Field("token_type_ids", length, shared="complete"),
            Field("ranks", length, fill=4 * length + 4, shared="complete"),
            Field("target_positions", slots, fill=length, shared="complete"),
            Field("directions", 1, shared="complete"),
            Field(LABELS, slots, IGNORE_LABEL, shared="complete"),
        )

    def budgets(self, lengths: NDArray[np.int64], data: DataSection) -> NDArray[np.int64]:
        """Return the [n] predictions of sequences of `lengths`: those of a full row by length, rounded down, or 1."""
        import numpy as np

        return np.maximum(1, self.config.slots(data) * lengths // data.seq_length)

    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> PermutedExamples:
        import numpy as np

        from ctxlm_ds.data.sample import Examples, starts_of
        from ctxlm_ds.objectives.corruption.permutation import permute_samples

        total = len(samples.input_ids)
        ranks, is_target = np.empty(total, dtype=np.int32), np.empty(total, dtype=np.bool_)
        goals, backward = np.asarray(budgets, dtype=np.int64), self._backward(samples)
        permute_samples(samples, key, goals, backward, self._rules, ranks, is_target)
        places = np.flatnonzero(is_target)
        owners = np.searchsorted(samples.starts, places, side="right") - 1
        examples = Examples(
            input_ids=samples.input_ids,
            starts=samples.starts,
            second_starts=samples.second_starts,
            sequence_labels=samples.sequence_labels,
            prediction_positions=(places - samples.starts[owners]).astype(np.int32),
            prediction_labels=samples.input_ids[places],
            prediction_starts=starts_of(np.bincount(owners, minlength=len(samples.keys))),
        )
        return PermutedExamples(examples, ranks)

    def _backward(self, sequences: Samples | Examples) -> NDArray[np.bool_]:
        """Return [c] bool, True for a sequence that is read backward."""
        return (sequences.sequence_labels == 1) & self._has_directions

    def fill(self, examples: PermutedExamples, row_starts: NDArray[np.int64], arrays: Arrays) -> int:
        import numpy as np

        from ctxlm_ds.data.stream.row_filling import fill_slots, fill_token_types, fill_values

        slots, types = arrays["target_positions"], arrays["token_type_ids"]
        row = fill_token_fields(examples.examples, row_starts, arrays, slots.shape[1])
        if row == FITS:
            fill_token_types(examples.examples, row_starts, types)
            np.copyto(types, CLS_TYPE, where=arrays["input_ids"] == self._cls_id)
            fill_slots(examples.examples, row_starts, slots, arrays[LABELS])
            fill_values(examples.examples, row_starts, examples.ranks, arrays["ranks"])
            filled = np.flatnonzero(np.diff(row_starts))
            arrays["directions"][filled, 0] = self._backward(examples.examples)[row_starts[filled]]
        return row

    def masked_row(
        self, ids: Sequence[int], places: Sequence[int], tokenizer: Tokenizer
    ) -> tuple[list[int], dict[str, Sequence[int]]]:
        """Return the text and its end: each place is predicted from all tokens that are not to be predicted."""
        row = [*ids, tokenizer.sep_id, tokenizer.cls_id]
        ranks = [int(place in places) for place in range(len(row))]
        types = [*[0] * (len(row) - 1), CLS_TYPE]
        return row, {self.slots_field: places, "ranks": ranks, "token_type_ids": types}

    def render(self, example: Example, tokenizer: Tokenizer) -> Text:
        """Return the text with predicted tokens in brackets."""
        shown = map(tokenizer.shown, example.prediction_labels.tolist())
        pairs = zip(example.prediction_positions.tolist(), shown, strict=True)
        predicted = {position: (lead, f"[{token}]", STYLES["mask"]) for position, (lead, token) in pairs}
        return render_tokens(example.input_ids, tokenizer, predicted)


def word_beginnings(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Return [vocabulary] bool, True for tokens that begin a word, special tokens and punctuation."""
    begins = tokenizer.word_start_mask()
    for token_id in range(tokenizer.vocab_size):
        token = tokenizer.id_to_token(token_id)
        begins[token_id] |= token in PUNCTUATION or token.startswith("<")
    return begins
