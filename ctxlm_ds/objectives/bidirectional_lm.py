"""Bidirectional language modelling (Peters 2018; bilm-tf): the next word of a text, and of its sentences backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ctxlm_ds.data.fields import FITS, IGNORE_LABEL, Field
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import GIVEN_SUMS, STYLES, LossTerm, Objective, render_tokens
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, ModelSection, ObjectiveSection, SmallInt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.text import Text

    from ctxlm_ds.data.index.index import RowSource
    from ctxlm_ds.data.sample import Samples
    from ctxlm_ds.objectives.base import Arrays
    from ctxlm_ds.tokenizers.base import Tokenizer

DIRECTIONS = ("", "reversed_")
"""Beginnings of the names of each direction's fields."""
FEWEST_CHARACTERS = 3
"""A character between the two that enclose a word."""


class BidirectionalLMSection(ObjectiveSection):
    """The next word at every position, and at those of the same sentences backward (ELMo)."""

    name: str = "bidirectional_lm"
    inputs: Literal["characters", "words"] = "characters"
    """What the model reads (model.inputs)."""
    max_characters: SmallInt = 50
    """Characters of a word, with the two that enclose it (model.max_characters); longer words are cut."""

    @property
    def idle_settings(self) -> tuple[str, ...]:
        return () if self.inputs == "characters" else ("max_characters",)

    def problems(self, data: DataSection) -> Iterator[Problem]:
        if self.max_characters < FEWEST_CHARACTERS:
            text = f"{self.max_characters} has no room for a character; set at least {FEWEST_CHARACTERS} (ELMo: 50)"
            yield Problem("objective.max_characters", text)

    def model_problems(self, model: ModelSection) -> Iterator[Problem]:
        for name in ("inputs", "max_characters"):
            ours, theirs = getattr(self, name), getattr(model, name, None)
            if theirs not in (None, ours) and name not in self.idle_settings:
                text = f"{ours}, but model.{name} is {theirs}; set both to the same"
                yield Problem(f"objective.{name}", text, (f"model.{name}",))


class BidirectionalExample(NamedTuple):
    """A row: input words and labels of both directions."""

    input_ids: NDArray[np.int32]  # [2, s]
    labels: NDArray[np.int32]  # [2, s]
    sequence_label: int

    @property
    def prediction_positions(self) -> range:
        """Places of the labels of both directions."""
        return range(self.labels.size)


class BidirectionalExamples(NamedTuple):
    """The rows of a micro-batch that are not empty (see BidirectionalExample)."""

    input_ids: NDArray[np.int32]  # [c, 2, s]
    labels: NDArray[np.int32]  # [c, 2, s]

    def example(self, number: int) -> BidirectionalExample:
        from ctxlm_ds.data.sample import NO_LABEL

        return BidirectionalExample(self.input_ids[number], self.labels[number], NO_LABEL)


class BidirectionalLM(Objective):
    """The objective of ELMo: the mean of both directions' losses.

    Each sentence is read from its beginning <S> on and predicts </S> last, or backward from </S> on and predicts <S>
    last; </S> never predicts the next sentence's <S>. A word outside the softmax is spelled at the input and is <UNK>
    as a label.
    """

    why_no_text = "predicts words in lanes of both directions, whose rows continue each other"
    section = BidirectionalLMSection
    outputs = ("forward_loss", "forward_correct", "backward_loss", "backward_correct")
    shifted = True
    lane_directions = 2
    terms = tuple(
        LossTerm(
            direction, (f"{direction}_loss", f"{direction}_correct"), (labels,), GIVEN_SUMS, 0.5, has_perplexity=True
        )
        for direction, labels in (("forward", "labels"), ("backward", "reversed_labels"))
    )

    def __init__(self, section: BidirectionalLMSection, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(section, tokenizer)
        self.config = section
        self._tokenizer = tokenizer

    def read_corpus(self, rows: RowSource, seed: int) -> None:
        """Refuse a tokenizer whose words have no characters."""
        if self.config.inputs == "characters" and not hasattr(self._tokenizer, "char_ids"):
            raise ConfigError(
                f"objective {self.name} reads the characters of words, which a tokenizer of kind "
                f"{getattr(self._tokenizer, 'kind', None)} does not have; make one with ctxlm tokenizer "
                "--type elmo, or set objective.inputs and model.inputs to words"
            )

    def fields(self, data: DataSection) -> tuple[Field, ...]:
        size = data.seq_length
        name, columns, fill = "input_ids", size, self.pad_id
        if self.config.inputs == "characters":
            name, columns, fill = "character_ids", size * self.config.max_characters, 0
        return (
            Field("sequence_ids", size, shared="complete"),
            Field("sequence_starts", data.sequences_per_row + 1, size, shared="complete"),
            *(Field(direction + name, columns, fill, shared="complete") for direction in DIRECTIONS),
            *(Field(f"{direction}labels", size, IGNORE_LABEL, shared="complete") for direction in DIRECTIONS),
        )

    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> BidirectionalExamples:
        """Take all words but the last of a row as inputs, all but the first as their labels."""
        import numpy as np

        assert self._tokenizer is not None
        begin, end, unk = self._tokenizer.cls_id, self._tokenizer.sep_id, self._tokenizer.unk_id
        size = int(samples.lengths[0]) // 2 if len(samples.lengths) else 1
        words = samples.input_ids.reshape(-1, 2, size)
        inputs, labels = words[:, :, :-1], words[:, :, 1:].copy()
        labels[:, 0][labels[:, 0] == begin] = end
        labels[:, 1][words[:, 1, 1:] == end] = begin
        outside = self._tokenizer.output_size
        np.copyto(labels, unk, where=labels >= outside)
        if self.config.inputs == "words":
            inputs = np.where(inputs < outside, inputs, unk).astype(np.int32)
        return BidirectionalExamples(inputs, labels)

    def fill(self, examples: BidirectionalExamples, row_starts: NDArray[np.int64], arrays: Arrays) -> int:
        import numpy as np

        used = np.flatnonzero(np.diff(row_starts))
        if len(used) == 0:
            return FITS
        if examples.labels.shape[-1] != arrays["labels"].shape[1] or len(used) != len(examples.labels):
            return int(used[0])
        arrays["sequence_ids"][used] = 1
        arrays["sequence_starts"][used, 0] = 0
        for number, direction in enumerate(DIRECTIONS):
            words = examples.input_ids[:, number]
            if self.config.inputs == "characters":
                arrays[f"{direction}character_ids"][used] = self._characters[words].reshape(len(used), -1)
            else:
                arrays[f"{direction}input_ids"][used] = words
            arrays[f"{direction}labels"][used] = examples.labels[:, number]
        return FITS

    @cached_property
    def _characters(self) -> NDArray[np.uint16]:
        """Characters of each word, [words, max_characters]."""
        import numpy as np

        tokenizer: Any = self._tokenizer
        return tokenizer.char_ids(tokenizer.words, self.config.max_characters).astype(np.uint16)

    def render(self, example: BidirectionalExample, tokenizer: Tokenizer) -> Text:
        """Return the words of each direction, and behind them in brackets what the last word predicts."""
        from rich.text import Text

        text = Text()
        for arrow, words, labels in zip("→←", example.input_ids, example.labels, strict=True):
            last = tokenizer.id_to_token(int(labels[-1]))
            text.append_text(render_tokens(words, tokenizer)).append(f" [{arrow}{last}] ", style=STYLES["mask"])
        return text
