"""Descriptions of downstream tasks: YAML files, shipped (`tasks/`) or a user's own. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from ctxlm_ds.apps.downstream.kinds.entries import TASKS, FileFormat, TaskKind
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.describe import dotted
from ctxlm_ds.recipe.problems import Problem, did_you_mean, explain_error, raise_problems
from ctxlm_ds.recipe.sections import Probability, Section, SmallInt
from ctxlm_ds.recipe.yaml_source import MAX_CHARACTERS, read_yaml
from ctxlm_ds.untrusted_json import read_text

TASK_DIR = Path(__file__).resolve().parent / "tasks"
Described = TypeVar("Described", bound=Section)
Column = str | int
"""Name of a column in the header (or key of a JSON object), or its number from 0."""

Text = Annotated[str, BeforeValidator(lambda value: json.dumps(value) if isinstance(value, int) else value)]
"""A label; YAML reads `0` as a number, `true` as in JSON."""


def _known(kind: str) -> str:
    if kind not in TASKS:
        raise ValueError(f"no kind of task{did_you_mean(kind, TASKS.names())}; there are {', '.join(TASKS.names())}")
    return kind


KindName = Annotated[str, AfterValidator(_known)]

FIELD = re.compile(r"\{(\w*)\}")
"""A field of a template: `{text}` or `{pair}`."""


class TaskDescription(Section):
    """One downstream task: its files, how they are read, and how predictions are judged."""

    title: str = ""
    """Name and publication, for people."""
    kind: KindName
    """What is predicted: a label, a number, a choice, tags, a span of a paragraph, a text, or labelled spans."""
    train: str
    """File of training examples, relative to --data; `.xz` and `.gz` files of that name are read too."""
    dev: str | None = None
    """File of held-out examples, which choose among runs."""
    test: str | None = None
    """File of further examples, which every run predicts, with or without labels."""
    format: FileFormat
    """Form of the files."""
    header: bool = True
    """Whether the first line of a tsv or csv file names its columns."""
    quoted: bool | None = None
    """Whether values may be in double quotes; null: in csv files they may, in tsv files a quote is a character."""
    columns: dict[str, Column | list[Column]] = {}
    """Column of each role: text, pair (second segment), label, choices (a list of columns, or one with a list)."""
    labels: dict[str, Text] | list[Text] | None = None
    """Labels in order, or value in the file -> name; null takes those of the training file, sorted."""
    range: tuple[float, float] | None = None
    """Lowest and highest value of a regression."""
    scheme: Literal["iob1", "iob2", "bioes"] | None = None
    """How the file writes spans of words as tags; null if tags describe single words (parts of speech)."""
    unanswerable: bool = False
    """Whether questions may have no answer (SQuAD 2.0)."""
    no_answer_threshold: float = 0.0
    """Lead of no answer over the best span, in logits, from which no answer is given."""
    metrics: list[str] = []
    """Metrics in the order of the report; the first chooses among runs. Empty takes all of the kind."""
    positive: Text | None = None
    """Label whose F1 the metric `f1` is; null takes the last."""
    max_length: Annotated[int, Field(ge=8, le=2**20)] = 128
    """Longest input in tokens, special ones included; a model with fewer positions shortens it."""
    stride: SmallInt = 64
    """Tokens by which two windows of a long paragraph or sentence overlap."""
    max_question_length: SmallInt = 64
    """Tokens of a question that are read; half of the input at most."""
    max_answer_length: SmallInt = 30
    """Longest answer in tokens."""
    symmetric: bool = False
    """Whether the texts of a pair may change places; causal models then read both orders."""
    split_special_tokens: bool | None = None
    """Whether names of special tokens inside texts are ordinary text; null: as the model's tokenizer says."""
    template: str | None = None
    """Input of an encoder-decoder, with `{text}` and `{pair}` (of a question: paragraph and question)."""
    label_words: dict[str, Text] = {}
    """Label -> text that an encoder-decoder writes for it; a label that is missing here is written as it is."""
    max_target_length: Annotated[int, Field(ge=2, le=2**14)] = 64
    """Longest text that an encoder-decoder learns and writes, in tokens."""
    max_span_words: Annotated[int, Field(ge=1, le=1000)] = 10
    """Longest span of words that a span classification can find."""
    flat: bool = False
    """Whether spans of a span classification exclude each other; of two that overlap the more probable one counts."""
    skip_broken: bool = False
    """Whether lines of a tsv or csv file with another number of columns are left out and counted."""
    validation_share: Annotated[Probability, Field(lt=1.0)] = 0.0
    """Share of the training file that is held out for development, in place of a file."""
    published: dict[str, float] = {}
    """Model -> score of the first metric in its publication, for the report."""

    @property
    def entry(self) -> TaskKind:
        return TASKS.get(self.kind)

    @property
    def judged_by(self) -> list[str]:
        """Return the metrics of the report, the one that chooses first."""
        return self.metrics or list(self.entry.metrics)

    def recorded(self) -> dict[str, Any]:
        """Return the settings that a result records; null settings that are newer than results are left out."""
        newer = {"split_special_tokens"} if self.split_special_tokens is None else None
        return self.model_dump(mode="json", exclude=newer)

    def column(self, role: str) -> Column:
        """Return the column of a role that has only one."""
        column = self.columns[role]
        assert not isinstance(column, list)
        return column

    def problems(self) -> Iterator[Problem]:
        if (self.dev is None) == (self.validation_share == 0):
            yield Problem("dev", "give either a file for development or validation_share")
        entry = self.entry
        if self.format not in entry.formats:
            expected = " or ".join(entry.formats)
            yield Problem("format", f"{self.format}: a task of kind {self.kind} is read from {expected}")
        needed, allowed = entry.needed, entry.allowed
        if self.format in ("conll", "tsv", "csv", "jsonl"):
            for role in needed:
                if role not in self.columns:
                    yield Problem(f"columns.{role}", "missing; name the column (or its number from 0)")
        for role, column in self.columns.items():
            if role not in needed + allowed:
                yield Problem(f"columns.{role}", f"unknown role{did_you_mean(role, needed + allowed)}")
            if isinstance(column, list) and role != "choices":
                yield Problem(f"columns.{role}", "only `choices` may be several columns")
        for metric in self.metrics:
            if metric not in entry.metrics:
                known = ", ".join(entry.metrics)
                near = did_you_mean(metric, entry.metrics)
                yield Problem("metrics", f"{metric}: a task of kind {self.kind} has the metrics {known}{near}")
        single = [name for value in self.columns.values() for name in (value if isinstance(value, list) else [value])]
        has_names = self.format == "jsonl" or (self.header and self.format != "conll")
        if not has_names and any(isinstance(name, str) for name in single):
            yield Problem("columns", "in conll files and without a header columns are numbers from 0")
        yield from self._template_problems()
        yield from self._scheme_problems()

    def _scheme_problems(self) -> Iterator[Problem]:
        if self.scheme is not None and not self.entry.reads_words:
            yield Problem("scheme", f"{self.scheme}: only tasks of kind tagging and span_classification have one")
        if self.entry.answer == "spans" and (self.format == "conll") == (self.scheme is None):
            yield Problem("scheme", "name the scheme of conll files (iob1, iob2, bioes); jsonl files have none")

    def _template_problems(self) -> Iterator[Problem]:
        has_pair = "pair" in self.columns or self.entry.answer == "span"
        expected = {"text", "pair"} if has_pair else {"text"}
        if self.template is not None and set(FIELD.findall(self.template)) != expected:
            fields = " and ".join(f"{{{name}}}" for name in sorted(expected, reverse=True))
            yield Problem("template", f"{self.template!r}: write {fields} once or more, and no other fields")
        labels = self.labels.values() if isinstance(self.labels, dict) else self.labels
        for name in self.label_words:
            if labels is not None and name not in labels:
                yield Problem(f"label_words.{name}", f"unknown label{did_you_mean(name, list(labels))}")


def shipped(folder: Path = TASK_DIR) -> list[str]:
    """Return the names of the shipped descriptions of tasks, or of those in another folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def is_file_name(name_or_path: str) -> bool:
    """Return whether a description is named by its file."""
    return Path(name_or_path).suffix in (".yaml", ".yml")


def load_task(name_or_path: str) -> tuple[str, TaskDescription]:
    """Return name and description of a shipped task, or of a YAML file; ConfigError lists every problem."""
    settings = "kind, train, dev, format, columns, …"
    path, task = load_description(TaskDescription, name_or_path, TASK_DIR, "task", settings)
    raise_problems(f"task {path}", list(task.problems()))
    return path.stem, task


def data_folder(name_or_path: str, data: Path | None) -> Path:
    """Return the folder of a task's files: by default the folder of the YAML file (ConfigError for a shipped task)."""
    if data is None and not is_file_name(name_or_path):
        raise ConfigError(f"--data: give the folder with the files of {name_or_path}")
    return Path(name_or_path).parent if data is None else data


def load_description(
    section: type[Described], name_or_path: str, folder: Path, noun: str, settings: str, inner: Iterable[str] = ()
) -> tuple[Path, Described]:
    """Return file and content of a description: one of `folder` by its name, or a YAML file.

    `noun` and some of its `settings` are for messages, and so are names of settings of sections inside (`inner`);
    ConfigError lists every problem.
    """
    path = Path(name_or_path)
    if not is_file_name(name_or_path):
        path, names = folder / f"{name_or_path}.yaml", shipped(folder)
        if not path.is_file():
            raise ConfigError(f"{name_or_path}: no shipped {noun}{did_you_mean(name_or_path, names)}; shipped are "
                              f"{', '.join(names)}; a description of your own ends in .yaml (--{noun})")  # fmt: skip
    source = read_yaml(read_text(path, ConfigError, MAX_CHARACTERS), str(path))
    title = f"{noun} {path}"
    raise_problems(title, [Problem(dotted(at), why, where=f"{path}:{line}") for at, line, why in source.problems])
    if not isinstance(source.data, dict):
        raise ConfigError(f"{path}: a {noun} is a section of settings ({settings})")
    try:
        return path, section.model_validate(source.data)
    except ValidationError as error:
        known = (*section.model_fields, *inner)
        raise_problems(title, [Problem(dotted(one["loc"]), explain_error(one, known)) for one in error.errors()])
        raise
