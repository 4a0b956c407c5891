"""Causal language modelling (GPT): every position predicts the next token of its text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxlm_ds.data.fields import FITS, IGNORE_LABEL, Field
from ctxlm_ds.objectives.base import STYLES, LossTerm, Objective, fill_token_fields, render_tokens, token_fields
from ctxlm_ds.recipe.sections import DataSection, ObjectiveSection

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.text import Text

    from ctxlm_ds.data.sample import Example, Examples, Samples
    from ctxlm_ds.objectives.base import Arrays
    from ctxlm_ds.tokenizers.base import Tokenizer


class CausalLMSection(ObjectiveSection):
    """The next token at every position (GPT)."""

    name: str = "causal_lm"


class CausalLM(Objective):
    """The objective of GPT; nothing is replaced and nothing is drawn."""

    section = CausalLMSection
    outputs = ("logits",)
    shifted = True
    next_tokens = "logits"
    terms = (LossTerm("causal_lm", ("logits",), ("causal_lm_labels",), has_perplexity=True),)

    def fields(self, data: DataSection) -> tuple[Field, ...]:
        labels = Field("causal_lm_labels", data.seq_length, IGNORE_LABEL, shared="positions")
        return (*token_fields(data, self.pad_id), labels)

    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> Examples:
        """Take all tokens but the last as inputs, all but the first as their labels."""
        import numpy as np

        from ctxlm_ds.data.sample import Examples, starts_of

        lengths = samples.lengths - 1
        starts = starts_of(lengths)
        is_input = np.ones(len(samples.input_ids), dtype=np.bool_)
        is_input[samples.starts[1:] - 1] = False
        is_label = np.ones(len(samples.input_ids), dtype=np.bool_)
        is_label[samples.starts[:-1]] = False
        return Examples(
            input_ids=samples.input_ids[is_input],
            starts=starts,
            second_starts=samples.second_starts,
            sequence_labels=samples.sequence_labels,
            prediction_positions=(np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)).astype(np.int32),
            prediction_labels=samples.input_ids[is_label],
            prediction_starts=starts,
        )

    def fill(self, examples: Examples, row_starts: NDArray[np.int64], arrays: Arrays) -> int:
        from ctxlm_ds.data.stream.row_filling import fill_position_labels

        labels = arrays["causal_lm_labels"]
        row = fill_token_fields(examples, row_starts, arrays, labels.shape[1])
        if row == FITS:
            fill_position_labels(examples, row_starts, labels)
        return row

    def render(self, example: Example, tokenizer: Tokenizer) -> Text:
        """Return the text, and behind it in brackets what its last token predicts."""
        text = render_tokens(example.input_ids, tokenizer)
        lead, last = tokenizer.shown(int(example.prediction_labels[-1]))
        return text.append(lead).append(f"[→{last}]", style=STYLES["mask"])
