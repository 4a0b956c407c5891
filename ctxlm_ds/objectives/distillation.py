"""Distillation of a masked language model: soft targets, masked tokens and the angles of hidden states (DistilBERT)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from ctxlm_ds.data.fields import FITS, IGNORE_LABEL, Field
from ctxlm_ds.objectives.base import LossTerm, count_positions
from ctxlm_ds.objectives.masked_lm import MaskedLM, MaskedLMSection
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, ModelSection, NonNegativeFloat, PositiveFloat

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ctxlm_ds.data.sample import Examples
    from ctxlm_ds.objectives.base import Arrays
    from ctxlm_ds.tokenizers.base import Tokenizer

LAST_HIDDEN = "hidden_states.-1"


class DistillationSection(MaskedLMSection):
    """Soft targets of a teacher, masked tokens, and the angle to the teacher's hidden states (DistilBERT)."""

    name: str = "distillation"
    soft_target_weight: NonNegativeFloat = 5.0
    """Weight of the divergence from the teacher's predictions, mean over positions (DistilBERT 5.0)."""
    temperature: PositiveFloat = 2.0
    """Divisor of both models' logits in the soft targets, whose divergence is multiplied by its square."""
    soft_targets: Literal["tokens", "masked"] = "tokens"
    """Positions with soft targets: all tokens, or the predicted ones only, which is much cheaper."""
    masked_lm_weight: NonNegativeFloat = 2.0
    """Weight of masked language modelling (DistilBERT 2.0)."""
    cosine_weight: NonNegativeFloat = 1.0
    """Weight of 1 - cos of the last hidden states of both models, mean over tokens (DistilBERT 1.0); 0 leaves it out,
    and the models may then have different widths."""

    @property
    def idle_settings(self) -> tuple[str, ...]:
        return super().idle_settings + (() if self.soft_target_weight else ("temperature",))

    def teacher_problems(self, model: ModelSection, teacher: ModelSection) -> Iterator[Problem]:
        if self.cosine_weight > 0.0 and model.width != teacher.width:
            yield Problem(
                "model.hidden_size",
                f"{model.width}, but the teacher has {teacher.width}: hidden states of different widths have no angle; "
                "make them equal, or set objective.cosine_weight to 0",
                ("teacher.path", "teacher.model", "objective.cosine_weight"),
            )


LOSSES = "ctxlm_ds.parallel.cross_entropy"
LOGITS = ("predicted_logits", "teacher.predicted_logits")
SOFT_TARGETS = LossTerm("soft_targets", LOGITS, ("soft_target_labels",), f"{LOSSES}:soft_target_sums")
COSINE = LossTerm(
    "cosine", (LAST_HIDDEN, f"teacher.{LAST_HIDDEN}"), ("sequence_ids",), f"{LOSSES}:cosine_sums",
    count=count_positions, has_accuracy=False,
)  # fmt: skip


class Distillation(MaskedLM):
    """The objective of DistilBERT (Sanh 2019, section 2; distiller.py of transformers' research projects)."""

    section: ClassVar[type[MaskedLMSection]] = DistillationSection
    teacher_outputs: tuple[str, ...] = ("predicted_logits", LAST_HIDDEN)

    def __init__(self, section: DistillationSection, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(section, tokenizer)
        self._every_token = section.soft_targets == "tokens"
        soft = replace(SOFT_TARGETS, weight=section.soft_target_weight, settings={"temperature": section.temperature})
        masked, *others = self.terms
        self.terms = (soft, replace(masked, weight=section.masked_lm_weight), *others)
        self.teacher_outputs = ("predicted_logits",)
        if section.cosine_weight > 0.0:
            self.terms = (*self.terms, replace(COSINE, weight=section.cosine_weight))
            self.taps = (LAST_HIDDEN,)
            self.teacher_outputs = ("predicted_logits", LAST_HIDDEN)

    def fields(self, data: DataSection) -> tuple[Field, ...]:
        fields = super().fields(data)
        slots = data.seq_length if self._every_token else self.slots(data)
        every = {"prediction_positions", "masked_lm_labels"}
        fields = tuple(replace(field, columns=slots) if field.name in every else field for field in fields)
        return (*fields, Field("soft_target_labels", slots, IGNORE_LABEL, shared="slots"))

    def fill(self, examples: Examples, row_starts: NDArray[np.int64], arrays: Arrays) -> int:
        import numpy as np

        positions, labels = arrays["prediction_positions"], arrays["masked_lm_labels"]
        targets = arrays["soft_target_labels"]
        if not self._every_token:
            row = super().fill(examples, row_starts, arrays)
            np.copyto(targets, 1, where=labels != IGNORE_LABEL)
            return row
        # Every position is a prediction slot; those of masked tokens have a label.
        masked, words = np.zeros_like(positions), np.full_like(labels, IGNORE_LABEL)
        row = super().fill(examples, row_starts, {**arrays, "prediction_positions": masked, "masked_lm_labels": words})
        if row == FITS:
            rows, slots = np.nonzero(words != IGNORE_LABEL)
            labels[rows, masked[rows, slots]] = words[rows, slots]
            positions[:] = np.arange(positions.shape[1])
            np.copyto(targets, 1, where=arrays["sequence_ids"] > 0)
        return row
