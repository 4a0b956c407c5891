"""Kinds of tasks: how their files are read, how they are judged, and which classes run them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ctxlm_ds.registry import Registry

FileFormat = Literal["tsv", "csv", "jsonl", "conll", "squad"]
Answer = Literal["label", "number", "choice", "tags", "span", "text", "spans"]
TEXT_FORM, GPT1_FORM, CRF_FORM = "text_to_text", "gpt1_inputs", "crf"
"""Other forms in which tasks of some kinds run; options of the command have the same names."""


@dataclass(frozen=True)
class TaskKind:
    """One kind of task; code asks it instead of comparing names of kinds."""

    answer: Answer
    """What is predicted: a label, a number, one of several choices, a tag of each word, a span of a paragraph, a text,
    or labelled spans of words."""
    runs: str
    """`module:class` of the `kinds.base.Kind` that fine-tunes a model."""
    formats: tuple[FileFormat, ...]
    """Forms of files that have such examples."""
    metrics: tuple[str, ...]
    """Metrics that the class computes; the first one chooses among runs."""
    needed: tuple[str, ...] = ("text", "label")
    """Columns of a file that must be named."""
    allowed: tuple[str, ...] = ()
    """Further columns that may be named."""
    forms: Mapping[str, str] = field(default_factory=dict)
    """Other form -> `module:class` that runs it."""
    always: str | None = None
    """Form that every task of the kind has."""
    frozen: str | None = None
    """`module:class` over frozen vectors of words; None if the kind is fine-tuned only."""

    @property
    def reads_words(self) -> bool:
        """Return whether a text is a list of words."""
        return self.answer in ("tags", "spans")


TABLES: tuple[FileFormat, ...] = ("tsv", "csv", "jsonl")
HERE = "ctxlm_ds.apps.downstream"
WRITTEN = f"{HERE}.kinds.text_to_text:TextToText"

CLASSIFICATION = TaskKind(
    "label", f"{HERE}.kinds.sequence:Classification", TABLES, ("accuracy", "f1", "macro_f1", "matthews"),
    allowed=("pair",), frozen=f"{HERE}.features.kinds:FrozenClassification",
    forms={TEXT_FORM: WRITTEN, GPT1_FORM: f"{HERE}.kinds.sequence:CausalClassification"},
)  # fmt: skip
REGRESSION = TaskKind(
    "number", f"{HERE}.kinds.sequence:Regression", TABLES, ("pearson", "spearman", "mse"),
    allowed=("pair",), frozen=f"{HERE}.features.kinds:FrozenRegression",
    forms={TEXT_FORM: WRITTEN, GPT1_FORM: f"{HERE}.kinds.sequence:CausalRegression"},
)  # fmt: skip
MULTIPLE_CHOICE = TaskKind(
    "choice", f"{HERE}.kinds.sequence:MultipleChoice", TABLES, ("accuracy",),
    needed=("text", "choices", "label"), allowed=("pair",), forms={GPT1_FORM: f"{HERE}.kinds.sequence:CausalChoice"},
)  # fmt: skip
TAGGING = TaskKind(
    "tags", f"{HERE}.kinds.tagging:Tagging", ("conll",), ("f1", "precision", "recall", "accuracy"),
    forms={CRF_FORM: f"{HERE}.kinds.tagging:CrfTagging"}, frozen=f"{HERE}.features.kinds:FrozenTagging",
)  # fmt: skip
QUESTION_ANSWERING = TaskKind(
    "span", f"{HERE}.kinds.spans:QuestionAnswering", ("squad",), ("f1", "exact_match"),
    needed=(), forms={TEXT_FORM: WRITTEN},
)  # fmt: skip
TEXT_TO_TEXT = TaskKind(
    "text", WRITTEN, TABLES, ("exact_match", "f1"), allowed=("pair",), forms={TEXT_FORM: WRITTEN}, always=TEXT_FORM
)
SPAN_CLASSIFICATION = TaskKind(
    "spans", f"{HERE}.kinds.spans:SpanClassification", ("jsonl", "conll"), ("f1", "precision", "recall")
)
KINDS = ("classification", "regression", "multiple_choice", "tagging", "question_answering", "text_to_text",
         "span_classification")  # fmt: skip
TASKS = Registry("task kind", "ctxlm_ds.tasks", {name: f"{__name__}:{name.upper()}" for name in KINDS})
"""Kinds of tasks by name. An application registers them, not the core, which knows no task."""
