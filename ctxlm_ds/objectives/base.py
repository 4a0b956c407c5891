"""The interface of an objective: the fields of a batch, their corruption, and the terms of the loss.

An objective is one file with its settings (an ObjectiveSection without torch and numpy) and an Objective. Its compiled
loops are imported when they run. One line of registry.py names it. Loader, engine, evaluation, preview and export loop
over `fields` and `terms` and know no name of either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ctxlm_ds.data.fields import FITS, Field
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, ModelSection, ObjectiveSection
from ctxlm_ds.registry import OBJECTIVES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.text import Text

    from ctxlm_ds.data.index.index import RowSource
    from ctxlm_ds.data.sample import Examples, Samples
    from ctxlm_ds.models.parts.comparison import Comparison
    from ctxlm_ds.tokenizers.base import Tokenizer

    Arrays = Mapping[str, NDArray[Any]]


VOCABULARY_SUMS = "ctxlm_ds.parallel.cross_entropy:vocabulary_sums"
SQUARED_TOTALS = "ctxlm_ds.parallel.cross_entropy:squared_totals"
GIVEN_SUMS = "ctxlm_ds.parallel.cross_entropy:given_sums"
CLASSIFICATION_SUMS = "ctxlm_ds.parallel.cross_entropy:classification_sums"
BINARY_SUMS = "ctxlm_ds.parallel.cross_entropy:binary_sums"
STYLES = {"mask": "bold yellow", "random": "bold red", "kept": "bold green", "special": "cyan", "text": ""}


@dataclass(frozen=True)
class LossTerm:
    """One term of the loss: a sum over the global batch divided by a global count, times a weight."""

    name: str
    outputs: tuple[str, ...]
    """Tensors of the model that the reduction takes, in this order."""
    labels: tuple[str, ...]
    """Fields of the batch, or further outputs of the model, that the reduction takes, in this order."""
    reduce: str = VOCABULARY_SUMS
    """`module:function` from (outputs, labels, ParallelContext) to Sums."""
    weight: float = 1.0
    count: Callable[[Arrays], int] | None = None
    """Function from the fields of a micro-batch to the divisor of the sum; None counts the labels of labels[0] that
    are not IGNORE_LABEL."""
    has_accuracy: bool = True
    """True if the reduction counts right predictions."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the reduction."""
    has_perplexity: bool = False
    """True if evaluation reports exp(loss) as `perplexity`, or as `TERM_perplexity` if several terms have one."""

    @property
    def predicts_tokens(self) -> bool:
        """Return whether the labels are tokens."""
        return self.reduce in (VOCABULARY_SUMS, GIVEN_SUMS)

    def given(self, outputs: tuple[str, ...]) -> LossTerm:
        """Return the term for a model that computes the loss itself.

        The model writes `outputs`: the sum of the losses, the right predictions and, with a z_loss, the sum of it.
        """
        loss_sum, correct, *squares = outputs
        chosen = tuple(squares) if self.reduce == SQUARED_TOTALS else (loss_sum, correct)
        return replace(self, outputs=chosen, reduce=GIVEN_SUMS)


class Objective(ABC):
    """The predictions that a model learns."""

    name: ClassVar[str]
    section: ClassVar[type[ObjectiveSection]]
    outputs: tuple[str, ...]
    """Tensors that it needs from the model; an instance has those of its settings."""
    for_outputs: ClassVar[Mapping[tuple[str, ...], Mapping[str, Any]]] = {}
    """Settings with which it needs other outputs than those of the class."""
    taps: tuple[str, ...] = ()
    """Further tensors that it needs from any transformer (models/parts/distillation.py)."""
    teacher_outputs: tuple[str, ...] = ()
    """Outputs and taps that it needs from a teacher; terms name them with `teacher.` before."""
    sequence_label: ClassVar[str | None] = None
    """What the labels of sequences must say (SampleFormat.sequence_label); None if it reads none."""
    shifted: ClassVar[bool] = False
    """True if a sample's last token must be only a label."""
    lane_directions: ClassVar[int] = 0
    """2 if samples must be those of lanes in both directions, 1 if they may be in lanes (SampleFormat)."""
    next_tokens: ClassVar[str | None] = None
    """Output with the logits of the next token at every position, by which texts are continued; None if none."""
    masked_tokens: ClassVar[str | None] = None
    """Output with the logits of the words at the places in `slots_field`, by which masks are filled; None if none."""
    slots_field: ClassVar[str] = "prediction_positions"
    """Field with the places of the predictions."""
    target_tokens: ClassVar[str | None] = None
    """Output with the logits of the next token of a target, which a decoder writes for an input; None if none."""
    why_no_text: ClassVar[str] = "predicts no next tokens, fills no masks and writes no targets"
    """Why the model writes no text, if it has none of these outputs."""

    terms: tuple[LossTerm, ...]
    z_loss: float = 0.0
    """objective.z_loss, if terms have it (build_objective)."""
    pad_id: int
    """Token of empty places."""

    def __init_subclass__(cls) -> None:
        """Name the class as its settings do."""
        if "section" in vars(cls):
            cls.name = cls.section.model_fields["name"].default

    def __init__(self, section: ObjectiveSection, tokenizer: Tokenizer | None = None) -> None:
        """Set up the objective; without a tokenizer it has terms and fields, but cannot corrupt."""
        self.pad_id = 0 if tokenizer is None else tokenizer.pad_id

    @property
    def tensors(self) -> tuple[str, ...]:
        """Tensors that terms may read: outputs and taps of the model, and those of the teacher."""
        return (*self.outputs, *self.taps, *(f"teacher.{name}" for name in self.teacher_outputs))

    @property
    def word_labels(self) -> dict[str, str | None]:
        """Logits that a term compares with words -> its labels; None if another term reads the logits as well."""
        others = (term for term in self.terms if term.reduce != SQUARED_TOTALS)
        read = Counter(name for term in others for name in (*term.outputs, *term.labels))
        terms = [term for term in self.terms if term.reduce == VOCABULARY_SUMS]
        return {term.outputs[0]: term.labels[0] if read[term.outputs[0]] == 1 else None for term in terms}

    @property
    def written_tokens(self) -> str | None:
        """Return the output by which the model writes into texts."""
        return self.next_tokens or self.masked_tokens or self.target_tokens

    def masked_row(
        self, ids: Sequence[int], places: Sequence[int], tokenizer: Tokenizer
    ) -> tuple[list[int], dict[str, Sequence[int]]]:
        """Return the input of a text whose masks are to be filled, and what further fields of its row begin with.

        `ids` are the tokens of the text, `places` those of the masks in it.
        """
        row = [tokenizer.cls_id, *ids, tokenizer.sep_id]
        return row, {self.slots_field: [place + 1 for place in places]}

    @property
    def generation_settings(self) -> dict[str, int]:
        """Settings of transformers' generate() that follow from what a decoder was trained on."""
        return {}

    def comparisons(self, model: ModelSection, teacher: ModelSection) -> Sequence[Comparison]:
        """Return what layers compare where it arises; their errors are tensors that terms read."""
        return ()

    @classmethod
    def is_static(cls, section: Any) -> bool:
        """Return whether a sample has the same masks in every epoch."""
        return False

    @abstractmethod
    def fields(self, data: DataSection) -> tuple[Field, ...]:
        """Return every field of a micro-batch; `sequence_ids` is one of them (positions that are not padding).

        Raises ConfigError if rows of this shape have no room for what the objective predicts.
        """

    def budgets(self, lengths: NDArray[np.int64], data: DataSection) -> NDArray[np.int64]:
        """Return the [n] most predictions of sequences of `lengths`, so that no row exceeds its fields."""
        return lengths

    def read_corpus(self, rows: RowSource, seed: int) -> None:  # noqa: B027 (most objectives need nothing)
        """Take what corruption needs from the training rows; called once, before the first batch of any rows."""

    def for_evaluation(self, mask_prob: float) -> Objective:
        """Return an objective with the same fields that predicts this share of the tokens; see evaluation.mask_prob."""
        return self

    @abstractmethod
    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> Any:
        """Make examples of samples, with the random words of each.

        Args:
            samples: c sequences of any lengths.
            key: key of the random streams; samples.keys selects each sequence's.
            budgets: [c] most predictions of each, at least 1.

        Returns:
            sample.Examples, or anything else with its method `example` that `fill` and `render` take.
        """

    @abstractmethod
    def fill(self, examples: Any, row_starts: NDArray[np.int64], arrays: Arrays) -> int:
        """Write the examples of rows into the fields, which hold their fill values.

        Args:
            examples: result of corrupt_batch.
            row_starts: [b + 1] first sequence of each row.
            arrays: [b, columns] by field, int32 or float32.

        Returns:
            FITS, or the first row that does not fit (data/stream/row_filling.py has loops for this).
        """

    def render(self, example: Any, tokenizer: Tokenizer) -> Text:
        """Return one sequence on one line, for people."""
        return render_tokens(example.input_ids, tokenizer)


def count_positions(arrays: Arrays) -> int:
    """Count the positions that are not padding."""
    return int((arrays["sequence_ids"] > 0).sum())


def token_fields(data: DataSection, pad_id: int) -> tuple[Field, ...]:
    """Return the fields of tokens and of the sequences that they belong to."""
    length = data.seq_length
    return (
        Field("input_ids", length, pad_id, shared="positions"),
        Field("position_ids", length, shared="positions"),
        Field("sequence_ids", length, shared="complete"),
        Field("sequence_starts", data.sequences_per_row + 1, length, shared="complete"),
    )


def fill_token_fields(examples: Examples, row_starts: NDArray[np.int64], arrays: Arrays, predictions: int) -> int:
    """Write token_fields; return FITS, or the first row with more of anything, or more than so many predictions."""
    from ctxlm_ds.data.stream.row_filling import fill_starts, fill_tokens, first_misfit

    input_ids, sequence_starts = arrays["input_ids"], arrays["sequence_starts"]
    row = first_misfit(examples, row_starts, input_ids.shape[1], sequence_starts.shape[1] - 1, predictions)
    if row == FITS:
        fill_tokens(examples, row_starts, input_ids, arrays["position_ids"], arrays["sequence_ids"])
        fill_starts(examples, row_starts, sequence_starts, True)
    return int(row)


def render_tokens(
    input_ids: NDArray[Any], tokenizer: Tokenizer, predicted: dict[int, tuple[str, str, str]] | None = None
) -> Text:
    """Return tokens on one line, with (space, text, style) of `predicted` at its positions."""
    from rich.text import Text

    text = Text()
    for position, token_id in enumerate(input_ids.tolist()):
        if predicted and position in predicted:
            lead, token, style = predicted[position]
        else:
            lead, token = tokenizer.shown(token_id)
            style = STYLES["special" if token_id in tokenizer.special_ids else "text"]
        text.append(lead).append(token, style=style)
    return text[1:] if text.plain.startswith(" ") else text


def share_problems(keep_prob: float, random_prob: float) -> Iterator[Problem]:
    """Yield a problem if the shares of chosen tokens that stay and that become random add up to more than 1."""
    if keep_prob + random_prob > 1.0:
        text = (
            f"{random_prob:g} and objective.keep_prob {keep_prob:g} add up to more than 1; the rest becomes the mask "
            "token (0.1 and 0.1 as published)"
        )
        yield Problem("objective.random_prob", text, ("objective.keep_prob",))


def build_objective(section: ObjectiveSection, tokenizer: Tokenizer | None = None) -> Objective:
    """Build the objective that a section names; without a tokenizer it has terms and fields, but cannot corrupt.

    Raises ConfigError or TokenizerError if the section does not go with the tokenizer.
    """
    built: Objective = OBJECTIVES.get(section.name)(section, tokenizer)
    if section.z_loss:
        built.z_loss, terms = section.z_loss, []
        for term in built.terms:
            terms.append(term)
            if term.reduce == VOCABULARY_SUMS and term.weight:
                names, weight = (f"{term.name}_z", term.outputs, term.labels), term.weight * section.z_loss
                terms.append(LossTerm(*names, SQUARED_TOTALS, weight, has_accuracy=False))
        built.terms = tuple(terms)
    return built
