"""Readers of the files of downstream tasks; each example remembers file and line.

Every file is checked completely before training starts.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import math
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from ctxlm_ds.apps.downstream.task import Column, TaskDescription
from ctxlm_ds.console import counted, logger
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.problems import did_you_mean, show_value
from ctxlm_ds.untrusted_json import one_value_remedy, parse_json

OPENERS: dict[str, Callable[..., Any]] = {"": open, ".xz": lzma.open, ".gz": gzip.open}
MAX_FIELD_CHARACTERS = 10**7
MAX_COMPRESSION = 50
MIN_UNPACKED_BYTES = 1 << 26
"""A packed file of texts is refused if it unpacks to more than both; text takes a fifth of its size."""
DOCUMENT_START = "-DOCSTART-"
SPLIT_SEED = 1
Key = TypeVar("Key")
Value = TypeVar("Value")
Row = dict[Column, Any]
"""Cells of a line by number and by name."""


@dataclass(frozen=True, slots=True)
class Example:
    """One example as the file has it."""

    origin: str
    """File and line."""
    text: str = ""
    """First segment, or the paragraph of a question."""
    pair: str | None = None
    """Second segment, or the question."""
    label: str | None = None
    """Label or number; None in a test file without labels."""
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    answers: tuple[tuple[str, int], ...] = ()
    """Texts and starts (characters of `text`) of the right answers."""
    spans: tuple[tuple[int, int, str], ...] = ()
    """First word, word after the last, and label of labelled spans."""
    identifier: str = ""

    def shown_text(self) -> str:
        """Return the inputs on one line."""
        return " | ".join(filter(None, (self.text, self.pair, *self.choices, " ".join(self.words))))

    def origin_of(self, word: int) -> str:
        """Return file and line of a word, and the word; words with tags have a line each."""
        path, _, line = self.origin.rpartition(":")
        return f"{path}:{int(line) + (word if self.tags else 0)} ({show_value(self.words[word])})"

    def texts(self) -> list[str]:
        """Return all that a tokenizer reads, a label to be written included."""
        return [self.text, self.pair or "", self.label or "", *self.choices, *self.words, *dict(self.answers)]

    def shown_label(self) -> str:
        """Return what is right on one line; empty if it is not known."""
        return self.label or " ".join(self.tags) or "; ".join(self.right_texts())

    def right_texts(self) -> list[str]:
        """Return the right answers, or the label."""
        return [answer for answer, _ in self.answers] or ([] if self.label is None else [self.label])


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, keys and values in their order."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def find_file(data: Path, name: str) -> Path:
    """Return the path of a task's file or of its compressed form (DataError if neither exists)."""
    for suffix in OPENERS:
        path = data / f"{name}{suffix}"
        if path.is_file():
            return path
    raise DataError(f"{data / name}: no such file (nor .xz, .gz); --data names the folder of the task's files")


@dataclass(frozen=True)
class Parts:
    """Examples of a task's files."""

    train: list[Example]
    dev: list[Example]
    test: list[Example] | None
    labels: list[str] = field(default_factory=list)
    """Labels of the complete training file (`prepare.read_parts`)."""


def read_files(task: TaskDescription, data: Path) -> Parts:
    """Read all files of a task (DataError names file, line, remedy); without a file for it, a share is held out."""
    train, dev = read_examples(task, find_file(data, task.train)), None
    if task.dev is not None:
        dev = read_examples(task, find_file(data, task.dev))
    else:
        random.Random(SPLIT_SEED).shuffle(train)
        num_held_out = max(1, round(len(train) * task.validation_share))
        train, dev = train[num_held_out:], train[:num_held_out]
    if not train:
        raise DataError(f"{data / task.train}: no examples are left for training; lower validation_share")
    test = None if task.test is None else read_examples(task, find_file(data, task.test), labelled=False)
    unlabelled = [] if task.unanswerable else [one for one in test or () if not one.shown_label()]
    if unlabelled and len(unlabelled) < len(test or ()):
        raise DataError(f"{unlabelled[0].origin}: no label, but other examples have one; give all of them or none")
    return Parts(train, dev, test)


def read_examples(task: TaskDescription, path: Path, labelled: bool = True) -> list[Example]:
    """Read all examples of a file, plain, .xz or .gz; labels of a test file (not `labelled`) may be missing.

    Raises DataError, which names file and line, if it is empty, no UTF-8, cut off, or a line does not fit the task.
    """
    text = read_text(path)
    if not text.strip():
        raise DataError(f"{path}: the file is empty")
    if task.format == "squad":
        examples = list(_read_squad(task, path, text))
    elif task.format == "conll":
        examples = list(_read_conll(task, path, text))
    else:
        make = _span_example if task.entry.answer == "spans" else _row_example
        rows = json_rows(path, text) if task.format == "jsonl" else _table_rows(task, path, text, labelled)
        examples = [make(task, f"{path}:{line}", row, labelled) for line, row in rows]
    if not examples:
        raise DataError(f"{path}: the file has no examples")
    _warn_of_doubtful(path, examples)
    for example in examples if "\\ud" in text.lower() else ():
        try:
            json.dumps(astuple(example), ensure_ascii=False).encode()
        except UnicodeEncodeError:  # JSON can escape it, and no tokenizer or file can take it
            raise DataError(f"{example.origin}: half of a surrogate pair (\\ud800 to \\udfff) is no character; "
                            "remove it") from None  # fmt: skip
    return examples


def _warn_of_doubtful(path: Path, examples: list[Example]) -> None:
    """Warn of examples without a text, and of several with one id."""
    parts = ((one, one.words or (one.text, "-" if one.pair is None else one.pair, *one.choices)) for one in examples)
    empty = [one.origin for one, texts in parts if not all(map(str.strip, texts))]
    first = {one.identifier: one for one in reversed(examples)}
    repeated = [one.origin for one in examples if first[one.identifier] is not one]
    for found, what in ((empty, "with an empty text"), (repeated, "with the id of an earlier one")):
        if found:
            logger.warning("%s: %s %s (the first: %s)", path, counted(len(found), "example"), what, found[0])


def read_text(path: Path) -> str:
    """Return the text of a file, plain, .xz or .gz; DataError if it is damaged, or no UTF-8."""
    most = max(MIN_UNPACKED_BYTES, MAX_COMPRESSION * path.stat().st_size)
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            raw = file.read(most + 1)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged or cut off ({error})") from None
    if len(raw) > most:
        raise DataError(f"{path}: unpacks to more than {most:,} bytes, {MAX_COMPRESSION} times its size; if that is "
                        "right, unpack it and give the plain file")  # fmt: skip
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line}: invalid UTF-8 (byte 0x{raw[error.start]:02x}); convert the file") from None


def _row_example(task: TaskDescription, origin: str, row: Row, labelled: bool) -> Example:
    column = task.column("label")
    answers = _answers(row, column, origin) if task.entry.answer == "text" else ()
    label = answers[0][0] if answers else _cell(row, column, origin, required=labelled)
    pair = _cell(row, task.column("pair"), origin) if "pair" in task.columns else None
    choices = _choices(row, task.columns["choices"], origin) if "choices" in task.columns else ()
    text = str(_cell(row, task.column("text"), origin))
    return Example(origin, text, pair, _label_text(task, label, origin), choices, answers=answers,
                   identifier=origin.rpartition(":")[2])  # fmt: skip


def _table_rows(task: TaskDescription, path: Path, text: str, labelled: bool) -> Iterator[tuple[int, Row]]:
    quoted = task.format == "csv" if task.quoted is None else task.quoted
    delimiter = "," if task.format == "csv" else "\t"
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=quoted,
                        quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE)  # fmt: skip
    names: list[str] = []
    width = broken = 0
    line = 1
    try:
        for row in reader:
            start, line = line, reader.line_num + 1
            if not row:
                continue
            if not width:
                width = len(row)
                other = next((one for one in "\t,;|" if one != delimiter and one in row[0]), None)
                if width == 1 and labelled and other is not None:
                    raise DataError(f"{path}:{start}: the line has no {delimiter!r} but {other!r}: wrong delimiter; "
                                    "`format` of the task is tsv (tab) or csv (comma)")  # fmt: skip
                if task.header:
                    names = [name.strip() for name in row]
                    continue
            if len(row) != width and task.skip_broken:
                broken += 1
                continue
            if len(row) != width:
                problem = f"{len(row)} columns, the first line has {width}"
                raise DataError(f"{path}:{start}: {problem}; separate columns by {delimiter!r}, or see `quoted`")
            yield start, {**dict(enumerate(row)), **dict(zip(names, row, strict=False))}
    except csv.Error as error:
        what = "a quote that begins in this row is not closed" if reader.line_num > line else error
        raise DataError(f"{path}:{line}: {what}; see `quoted` of the task's description") from None
    if broken:
        logger.info("%s: %s with another number of columns left out", path, counted(broken, "line"))


def json_rows(path: Path, text: str) -> Iterator[tuple[int, Row]]:
    """Yield the number and the object of each line of a file's text; DataError for a line that holds none."""
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        if line == 1 and (remedy := one_value_remedy(content, str(path))):
            raise DataError(f"{path}:1: {remedy}")
        row = _parse(content, f"{path}:{line}")
        if not isinstance(row, dict):
            raise DataError(f"{path}:{line}: a line is a JSON object, not {show_value(row)}")
        yield line, row


def _parse(text: str, origin: str) -> Any:
    try:
        return parse_json(text, finite=True)
    except ValueError as error:
        raise DataError(f"{origin}: no JSON ({error})") from None


def _cell(row: Row, column: Column, origin: str, required: bool = True) -> Any:
    value = row.get(column)
    if value is None and required and column in row:
        raise DataError(f"{origin}: {column} is null; write a value or remove the line")
    if value is None and required:
        names = [name for name in row if isinstance(name, str)]
        has = f"{', '.join(names) or counted(len(row), 'column')}{did_you_mean(str(column), names)}"
        raise DataError(f"{origin}: no {column}; the line has {has}")
    if not required or isinstance(value, (str, int, float)):
        return value
    raise DataError(f"{origin}: {column} is {show_value(value)}, not a text or a number")


def _choices(row: Row, column: Column | list[Column], origin: str) -> tuple[str, ...]:
    if isinstance(column, list):
        return tuple(str(_cell(row, one, origin)) for one in column)
    value = row.get(column)
    if not _is_texts(value) or len(value) < 2:
        raise DataError(f"{origin}: {column} is a list of two or more texts, not {show_value(value)}")
    return tuple(value)


def _is_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _answers(row: Row, column: Column, origin: str) -> tuple[tuple[str, int], ...]:
    """Return the right texts if a line has a list of them; the first is learned."""
    value = row.get(column)
    if not isinstance(value, list):
        return ()
    if not _is_texts(value) or not all(one.strip() for one in value):
        raise DataError(f"{origin}: {column} is a text or a list of texts, not {show_value(value)}")
    return tuple((one, 0) for one in value)


def _label_text(task: TaskDescription, value: Any, origin: str) -> str | None:
    if value is None:
        return None
    label = json.dumps(value) if isinstance(value, bool) else str(value).strip()
    if task.entry.answer == "number":
        return _number(task, label, origin)
    if task.labels is not None and label not in task.labels:
        raise DataError(f"{origin}: unknown label {show_value(label)}; the task has {', '.join(task.labels)}")
    if isinstance(task.labels, dict):
        return task.labels[label]
    if not label:
        raise DataError(f"{origin}: the label is empty")
    return label


def _number(task: TaskDescription, label: str, origin: str) -> str:
    try:
        number = float(label)
    except ValueError:
        raise DataError(f"{origin}: the score {show_value(label)} is not a number") from None
    if not math.isfinite(number):
        raise DataError(f"{origin}: the score {show_value(label)} is not finite; remove the line")
    low, high = task.range or (number, number)
    if not low <= number <= high:
        raise DataError(f"{origin}: the score {number} is outside of {low} to {high}")
    return label


def _read_conll(task: TaskDescription, path: Path, text: str) -> Iterator[Example]:
    word_column, tag_column = int(task.column("text")), int(task.column("label"))
    words: list[str] = []
    tags: list[str] = []
    start = 1
    for line, content in enumerate([*text.split("\n"), ""], 1):
        cells = content.split("\t") if "\t" in content else [cell for cell in content.rstrip("\r").split(" ") if cell]
        if cells and cells[0] != DOCUMENT_START:
            if max(word_column, tag_column) >= len(cells):
                raise DataError(f"{path}:{line}: {len(cells)} columns; words are in column {word_column}, "
                                f"tags in column {tag_column}: each word needs its tag")  # fmt: skip
            word, tag = cells[word_column].strip(), cells[tag_column].strip()
            if not word or not tag:
                raise DataError(f"{path}:{line}: the {'tag' if word else 'word'} is empty; each word needs its tag")
            start = start if words else line
            words.append(word)
            tags.append(tag)
        elif words:
            yield Example(f"{path}:{start}", words=tuple(words), tags=tuple(tags), identifier=str(start))
            words, tags = [], []


def _span_example(task: TaskDescription, origin: str, row: Row, labelled: bool) -> Example:
    words, spans = row.get(task.column("text")), row.get(task.column("label"))
    if not _is_texts(words) or not all(one.strip() for one in words):
        raise DataError(f"{origin}: {task.columns['text']} is a list of words, not {show_value(words)}")
    identifier = origin.rpartition(":")[2]
    if spans is None and not labelled:
        return Example(origin, words=tuple(words), identifier=identifier)
    if not isinstance(spans, list):
        raise DataError(f"{origin}: {task.columns['label']} is a list of [start, end, label], not {show_value(spans)}")
    found: dict[tuple[int, int], str] = {}
    for span in spans:
        start, end, label = _span(span, len(words), origin)
        if found.setdefault((start, end), label) != label:
            raise DataError(f"{origin}: words {start} to {end} have two labels, {found[start, end]} and {label}; "
                            "a span has one")  # fmt: skip
    shown = [f"{label}: {' '.join(words[start:end])}" for (start, end), label in found.items()]
    return Example(origin, words=tuple(words), label="; ".join(shown) or "no spans", identifier=identifier,
                   spans=tuple((*place, label) for place, label in found.items()))  # fmt: skip


def _span(value: Any, num_words: int, origin: str) -> tuple[int, int, str]:
    shape = [type(one) for one in value] if isinstance(value, list) else []
    if shape != [int, int, str] or not value[2].strip():
        raise DataError(f"{origin}: a span is [start, end, label] (two numbers and a text), not {show_value(value)}")
    start, end, label = value
    if not 0 <= start < end <= num_words:
        raise DataError(f"{origin}: the span {show_value(value)} is not within the {num_words} words; start is the "
                        "first word, counted from 0, end is the word after the last")  # fmt: skip
    return start, end, label.strip()


def _read_squad(task: TaskDescription, path: Path, text: str) -> Iterator[Example]:
    articles, origin = _parse(text, str(path)), str(path)
    try:
        for number, article in enumerate(articles["data"]):
            origin = f"{path}: article {number}"
            for place, paragraph in enumerate(article["paragraphs"]):
                origin = f"{path}: article {number}, paragraph {place}"
                for question in paragraph["qas"]:
                    origin = f"{path}: article {number}, paragraph {place}, question {question.get('id')}"
                    yield _squad_example(task, paragraph["context"], question, origin)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{origin}: not in the form of SQuAD: {error} is missing or of another type") from None


def _squad_example(task: TaskDescription, context: str, question: dict[str, Any], origin: str) -> Example:
    answers = tuple((str(one["text"]), one["answer_start"]) for one in question.get("answers", []))
    for answer, start in answers:
        if type(start) is not int:
            raise DataError(f"{origin}: `answer_start` is {show_value(start)}, not the place of a character")
        found = context[start : start + len(answer)] if start >= 0 else ""
        if not answer or found != answer:
            raise DataError(f"{origin}: the answer {show_value(answer)} is not at character {start}, "
                            f"there is {show_value(found)}; correct `answer_start`")  # fmt: skip
    if not answers and not task.unanswerable:
        raise DataError(f"{origin}: no answer; a task with such questions says `unanswerable: true`")
    return Example(origin, context, str(question["question"]), answers=answers, identifier=str(question["id"]))
