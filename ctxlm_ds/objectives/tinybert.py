"""Distillation of a teacher's layers into a smaller student (TinyBERT, Jiao 2020).

The student learns the teacher's embeddings, hidden states and attention scores, or the predictions of a teacher that
was fine-tuned for a task. No label of the text is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ctxlm_ds.data.fields import FITS, Field
from ctxlm_ds.objectives.base import LossTerm, count_positions, fill_token_fields, token_fields
from ctxlm_ds.objectives.masked_lm import Masking, MaskingSection
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, ModelSection, NonNegativeFloat, PositiveFloat, Probability, SmallInt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ctxlm_ds.data.sample import Examples, Samples
    from ctxlm_ds.models.parts.comparison import Comparison
    from ctxlm_ds.objectives.base import Arrays
    from ctxlm_ds.tokenizers.base import Tokenizer

LAYER_MAP = "objective.layer_map"
WEIGHTS = ("embedding_weight", "hidden_weight", "attention_weight", "prediction_weight")


class TinyBertSection(MaskingSection):
    """Hidden states and attention scores of a teacher (TinyBERT)."""

    may_mask_nothing: ClassVar[bool] = True
    shares_positions: ClassVar[bool] = False

    name: str = "tinybert"
    mask_prob: Probability = 0.0
    """Share of the tokens that are masked in the inputs of both models; none of them is predicted."""
    layer_map: list[SmallInt] | None = None
    """Teacher's layer that each of the student's layers learns from, counted from 1; null spaces them evenly, with the
    last for the last (N/M·m)."""
    embedding_weight: NonNegativeFloat = 1.0
    """Weight of the mean squared difference of the embeddings, through the projection (model.fit_size)."""
    hidden_weight: NonNegativeFloat = 1.0
    """Weight of the mean squared differences of the hidden states, through the projection, added over the layers."""
    attention_weight: NonNegativeFloat = 1.0
    """Weight of the mean squared differences of attention scores before the softmax, added over the layers; both models
    need as many heads."""
    prediction_weight: NonNegativeFloat = 0.0
    """Weight of the cross entropy with the classes that a fine-tuned teacher predicts (task distillation: 1, and 0 for
    the others)."""
    temperature: PositiveFloat = 1.0
    """Divisor of both models' logits in it."""

    @property
    def idle_settings(self) -> tuple[str, ...]:
        of_masks = () if self.mask_prob else set(MaskingSection.model_fields) - {"name", "z_loss", "mask_prob"}
        mapped = () if self.hidden_weight or self.attention_weight else ("layer_map",)
        return (*super().idle_settings, *of_masks, *mapped, *(() if self.prediction_weight else ("temperature",)))

    def teacher_problems(self, model: ModelSection, teacher: ModelSection) -> Iterator[Problem]:
        layers, theirs = model.num_blocks, teacher.num_blocks
        involved = ("model.num_layers", "teacher.path")
        if self.layer_map is None and theirs % layers:
            text = f"null, but {layers} layers do not divide the teacher's {theirs} evenly; name a layer for each"
            yield Problem(LAYER_MAP, text, involved)
        if self.layer_map is not None and len(self.layer_map) != layers:
            yield Problem(
                LAYER_MAP, f"{self.layer_map} names {len(self.layer_map)} layers, the student has {layers}", involved
            )
        if self.layer_map is not None and max(self.layer_map, default=0) > theirs:
            yield Problem(LAYER_MAP, f"{self.layer_map}: the teacher has only {theirs} layers", involved)
        heads, their_heads = (getattr(one, "num_attention_heads", None) for one in (model, teacher))
        if self.attention_weight and heads != their_heads:
            text = (
                f"{heads} heads cannot learn the attention scores of the teacher's {their_heads}; give the student as "
                "many, or set objective.attention_weight to 0"
            )
            yield Problem("model.num_attention_heads", text, ("objective.attention_weight", "teacher.path"))
        size = getattr(model, "fit_size", teacher.width)
        if (self.embedding_weight or self.hidden_weight) and size != teacher.width:
            text = f"{size} is not the width of the teacher's hidden states; set it to {teacher.width}"
            yield Problem("model.fit_size", text, ("teacher.path",))
        classes, their_classes = (getattr(one, "num_classes", None) for one in (model, teacher))
        if self.prediction_weight and their_classes is not None and (classes != their_classes or classes == 1):
            text = f"{classes}, but the teacher has {their_classes}; both need the same, 2 or more (1 is a regression)"
            yield Problem("model.num_classes", text, ("teacher.path", "objective.prediction_weight"))

    def mapped_layers(self, num_layers: int, num_teacher_layers: int) -> Sequence[int]:
        """Return the teacher's layer of each of the student's layers, counted from 1."""
        if self.layer_map is not None:
            return self.layer_map
        share = num_teacher_layers // num_layers
        return range(share, num_teacher_layers + 1, share)


def count_sequences(arrays: Arrays) -> int:
    return int(arrays["sequence_ids"].max(axis=1).sum())


def count_pairs(arrays: Arrays) -> int:
    """Count the pairs of positions of one sequence: the sum of squared lengths."""
    ids = arrays["sequence_ids"]
    lengths = ((ids == number).sum(axis=1) for number in range(1, int(ids.max(initial=0)) + 1))
    return sum(int((length.astype("int64") ** 2).sum()) for length in lengths)


SUMS = "ctxlm_ds.models.parts.comparison"
EMBEDDING, HIDDEN, ATTENTION = (
    LossTerm(f"{name}_mse", (f"{name}_error",), ("sequence_ids",), f"{SUMS}:{reduce}", 1.0, count, has_accuracy=False)
    for name, reduce, count in (
        ("embedding", "token_error_sums", count_positions),
        ("hidden", "token_error_sums", count_positions),
        ("attention", "pair_error_sums", count_pairs),
    )
)
PREDICTION = LossTerm(
    "class_targets", ("class_logits", "teacher.class_logits"), ("sequence_ids",),
    "ctxlm_ds.parallel.cross_entropy:soft_class_sums", 1.0, count_sequences,
)  # fmt: skip


class TinyBert(Masking):
    """The objective of TinyBERT's general distillation, and of both steps of its task distillation."""

    section = TinyBertSection
    why_no_text = "learns its teacher's hidden states, attention and classes, and has no output over words"
    outputs: tuple[str, ...] = ("hidden_states.-1", "projected_states")
    for_outputs = {
        ("hidden_states.-1",): dict.fromkeys(WEIGHTS[:2], 0.0),
        ("class_logits",): dict.fromkeys(WEIGHTS[:3], 0.0) | {"prediction_weight": 1.0},
    }
    teacher_outputs: tuple[str, ...] = ("hidden_states.0",)  # comparisons name the others
    terms: tuple[LossTerm, ...] = (EMBEDDING, HIDDEN, ATTENTION)
    config: TinyBertSection

    def __init__(self, section: TinyBertSection, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(section, tokenizer)
        weights = (section.embedding_weight, section.hidden_weight, section.attention_weight)
        terms = zip(type(self).terms, weights, strict=True)
        self.terms = tuple(replace(term, weight=weight) for term, weight in terms if weight)
        if not section.embedding_weight and not section.hidden_weight:
            self.outputs = self.outputs[: len(self.terms)]
            self.teacher_outputs = self.teacher_outputs[: len(self.terms)]
        if section.prediction_weight:
            settings = {"temperature": section.temperature}
            self.terms = (*self.terms, replace(PREDICTION, weight=section.prediction_weight, settings=settings))
            self.outputs, self.teacher_outputs = (
                (*names, "class_logits") for names in (self.outputs, self.teacher_outputs)
            )

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(name for term in self.terms for name in term.outputs)

    def comparisons(self, model: ModelSection, teacher: ModelSection) -> list[Comparison]:
        from ctxlm_ds.models.parts.comparison import Comparison

        wanted = self.tensors
        mapped = list(enumerate(self.config.mapped_layers(model.num_blocks, teacher.num_blocks), start=1))
        hidden, scores = "hidden_states", "attention_scores"
        found = [
            Comparison(f"{hidden}.0", f"{hidden}.0", "embedding_error"),
            *(Comparison(f"{hidden}.{ours}", f"{hidden}.{theirs}", "hidden_error") for ours, theirs in mapped),
            *(Comparison(f"{scores}.{m - 1}", f"{scores}.{n - 1}", "attention_error") for m, n in mapped),
        ]
        return [comparison for comparison in found if comparison.into in wanted]

    def fields(self, data: DataSection) -> tuple[Field, ...]:
        first = Field("cls_positions", data.sequences_per_row, shared="complete")
        types = Field("token_type_ids", data.seq_length, shared="positions")
        return (*token_fields(data, self.pad_id), types, *((first,) if self.config.prediction_weight else ()))

    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> Examples:
        """Mask as BERT, or nothing."""
        import numpy as np

        from ctxlm_ds.data.sample import Examples

        if self.config.mask_prob > 0.0:
            return super().corrupt_batch(samples, key, budgets)
        none = np.empty(0, dtype=np.int32)
        return Examples(
            samples.input_ids, samples.starts, samples.second_starts, samples.sequence_labels, none, none,
            np.zeros(len(samples.starts), dtype=np.int64),
        )  # fmt: skip

    def fill(self, examples: Examples, row_starts: NDArray[np.int64], arrays: Any) -> int:
        from ctxlm_ds.data.stream.row_filling import fill_starts, fill_token_types

        row = fill_token_fields(examples, row_starts, arrays, arrays["input_ids"].shape[1])
        if row == FITS:
            fill_token_types(examples, row_starts, arrays["token_type_ids"])
            if "cls_positions" in arrays:
                fill_starts(examples, row_starts, arrays["cls_positions"], False)
        return row
