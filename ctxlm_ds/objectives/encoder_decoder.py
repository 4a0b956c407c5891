"""The common part of objectives whose decoder writes a target for an input (T5, BART)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ctxlm_ds.data.fields import FITS, IGNORE_LABEL, Field
from ctxlm_ds.objectives.base import STYLES, LossTerm, Objective, render_tokens, token_fields
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, ObjectiveSection, SmallInt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.text import Text

    from ctxlm_ds.data.sample import TargetExample, TargetExamples
    from ctxlm_ds.objectives.base import Arrays
    from ctxlm_ds.tokenizers.base import Tokenizer

DECODER_FIELDS = ("decoder_input_ids", "decoder_position_ids", "decoder_sequence_ids", "decoder_sequence_starts")
FRAME = 2
"""Tokens around a text: <s> and </s>, or </s> and a language."""
END_TOKENS = 1
"""The end-of-text token after inputs and targets of denoisers."""
LABELS = "decoder_labels"


def target_term(name: str) -> LossTerm:
    """Return the term of the decoder's next tokens."""
    return LossTerm(name, ("decoder_logits",), (LABELS,))


def longest_target(length: int, insert_ratio: float) -> int:
    """Return the most tokens of a target, so that an input with its inserted tokens has at most `length`."""
    return int(length / (1.0 + insert_ratio) + 1e-9)


class EncoderDecoderSection(ObjectiveSection):
    """Settings of an objective with a target."""

    decoder_start: Literal["pad", "sep"] = "pad"
    """Token that the decoder reads first: `pad` (T5), or `sep`, the end of a text (BART)."""
    target_multiple: SmallInt = 1
    """Positions of a decoder's row are padded to a multiple of this, so that parallel.context_parallel_size divides
    them."""

    def target_length(self, data: DataSection) -> int:
        """Return the most tokens of a row's targets."""
        return data.seq_length

    def target_positions(self, data: DataSection) -> int:
        """Return the positions of a decoder's row."""
        return -(-self.target_length(data) // self.target_multiple) * self.target_multiple

    def stack_lengths(self, data: DataSection) -> tuple[int, ...]:
        return data.seq_length, self.target_positions(data)

    def packing_problems(self, data: DataSection, room: str, remedy: str = "set it to false") -> Iterator[Problem]:
        """Yield a problem if texts share rows, in which the objective leaves this room for one text."""
        if data.shares_rows:
            text = (
                f"true, but objective.name {self.name} leaves room in a row for {room} one text, so texts cannot share "
                f"rows; {remedy}"
            )
            yield Problem("data.packing", text, ("objective.name", "data.sample_format"))


class EncoderDecoder(Objective):
    """The next token of a target at every position of the decoder; `corrupt_batch` returns sample.TargetExamples.

    The decoder reads the target one place later, after a start token. Its fields have the names of the encoder's with
    `decoder_` before: they are tokens, positions and sequences of the decoder's rows.
    """

    outputs = ("decoder_logits",)
    target_tokens: ClassVar[str | None] = "decoder_logits"
    config: EncoderDecoderSection

    def __init__(self, section: EncoderDecoderSection, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(section, tokenizer)
        self.config = section
        self._special_ids = frozenset() if tokenizer is None else tokenizer.special_ids
        self._start_id = self.pad_id
        if tokenizer is not None and section.decoder_start == "sep":
            self._start_id = tokenizer.sep_id

    def input_row(self, ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
        """Return the input of a text for which the decoder is to write a target."""
        return [*ids, tokenizer.sep_id]

    def start_ids(self, examples: TargetExamples) -> int | NDArray[np.int32]:
        """Return the token that the decoder reads first, or that of each sequence [c]."""
        return self._start_id

    def restored(self, fields: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """Return [b, t]: True for labels that are text which the input lacks, here for all that are text.

        An objective whose targets repeat the input has its own.
        """
        import numpy as np

        labels = fields[LABELS]
        return ~np.isin(labels, [IGNORE_LABEL, *self._special_ids])

    @property
    def generation_settings(self) -> dict[str, int]:
        return {"decoder_start_token_id": self._start_id}

    def fields(self, data: DataSection) -> tuple[Field, ...]:
        length, most = self.config.target_positions(data), data.sequences_per_row
        ids, positions, sequences, starts = DECODER_FIELDS
        return (
            *token_fields(data, self.pad_id),
            Field(ids, length, self.pad_id, shared="positions"),
            Field(positions, length, shared="positions"),
            Field(sequences, length, shared="complete"),
            Field(starts, most + 1, length, shared="complete"),
            Field(LABELS, length, IGNORE_LABEL, shared="positions"),
        )

    def budgets(self, lengths: NDArray[np.int64], data: DataSection) -> NDArray[np.int64]:
        """Return the [n] most tokens of the inputs of texts of `lengths`."""
        import numpy as np

        return np.full(len(lengths), data.seq_length, dtype=np.int64)

    def fill(self, examples: TargetExamples, row_starts: NDArray[np.int64], arrays: Arrays) -> int:
        import numpy as np

        from ctxlm_ds.data.stream.row_filling import fill_starts, fill_tokens

        targets = examples._replace(input_ids=examples.target_ids, starts=examples.target_starts)
        names = ("input_ids", "position_ids", "sequence_ids", "sequence_starts")
        for part, stack in ((examples, names), (targets, (LABELS, *DECODER_FIELDS[1:]))):
            ids, positions, sequences, starts = (arrays[name] for name in stack)
            too_long = np.diff(part.starts[row_starts]) > ids.shape[1]
            too_many = np.diff(row_starts) >= starts.shape[1]
            if (too_long | too_many).any():
                return int((too_long | too_many).argmax())
            fill_tokens(part, row_starts, ids, positions, sequences)
            fill_starts(part, row_starts, starts, True)
        inputs, labels, positions = arrays[DECODER_FIELDS[0]], arrays[LABELS], arrays[DECODER_FIELDS[1]]
        inside = labels != IGNORE_LABEL
        inputs[:, 1:] = np.where(inside[:, 1:], labels[:, :-1], self.pad_id)
        inputs[inside & (positions == 0)] = self.start_ids(examples)
        return FITS

    def render(self, example: TargetExample, tokenizer: Tokenizer) -> Text:
        """Return the input, and the target behind an arrow."""
        text = render_tokens(example.input_ids, tokenizer)
        return text.append(" → ", style=STYLES["mask"]).append_text(render_tokens(example.target_ids, tokenizer))
