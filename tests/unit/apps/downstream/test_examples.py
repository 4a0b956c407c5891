"""Readers of task files: what they return, and how bad data is refused."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.downstream.examples import find_file, read_examples, read_files
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.errors import DataError

TEXTS: dict[str, Any] = {"kind": "classification", "format": "tsv", "columns": {"text": "s", "label": "y"}}
NUMBERS: dict[str, Any] = {"kind": "regression", "format": "csv", "columns": {"text": 0, "pair": 1, "label": 2},
                           "header": False, "range": (0, 5)}  # fmt: skip
TAGS: dict[str, Any] = {"kind": "tagging", "format": "conll", "columns": {"text": 0, "label": 1}, "scheme": "iob1"}
ANSWERS: dict[str, Any] = {"kind": "question_answering", "format": "squad"}


def task(**settings: Any) -> TaskDescription:
    return TaskDescription(train="train", dev="dev", **settings)


def squad(context: str, *answers: tuple[str, int]) -> str:
    question = {"id": "q1", "question": "Who?", "answers": [{"text": text, "answer_start": at} for text, at in answers]}
    return json.dumps({"data": [{"title": "t", "paragraphs": [{"context": context, "qas": [question]}]}]})


def test_tsv_keeps_quotes_and_csv_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text('\ufeffs\ty\n"a\tgood\n\nb "c"\tbad\n', encoding="utf-8")
    found = read_examples(task(**TEXTS), path)
    assert [(one.text, one.label, one.origin) for one in found] == [
        ('"a', "good", f"{path}:2"),
        ('b "c"', "bad", f"{path}:4"),
    ]
    path.write_text('"a, ""b""\nc",d,2.5\nx,y,0\n', encoding="utf-8")
    found = read_examples(task(**NUMBERS), path)
    assert [(one.text, one.pair, one.label) for one in found] == [('a, "b"\nc', "d", "2.5"), ("x", "y", "0")]
    assert found[1].origin == f"{path}:3"


def test_compressed_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.xz").write_bytes(lzma.compress(b"s\ty\nx\t1\n"))
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"s\ty\nx\t1\n"))
    for name in "ab":
        assert [one.text for one in read_examples(task(**TEXTS), find_file(tmp_path, name))] == ["x"]
    with pytest.raises(DataError, match="no such file"):
        find_file(tmp_path, "c")
    (tmp_path / "a.xz").write_bytes((tmp_path / "a.xz").read_bytes()[:30])
    with pytest.raises(DataError, match="damaged or cut off"):
        read_examples(task(**TEXTS), tmp_path / "a.xz")


@pytest.mark.parametrize("suffix, module", [(".xz", lzma), (".gz", gzip)])
def test_a_small_file_that_unpacks_to_very_much_is_refused(tmp_path: Path, suffix: str, module: Any) -> None:
    path = tmp_path / f"train{suffix}"
    with module.open(path, "wb") as file:
        for _ in range(65):
            file.write(b"s\ty\n" * (1 << 18))
    with pytest.raises(DataError, match="unpacks to more than 67,108,864 bytes"):
        read_examples(task(**TEXTS), path)


def test_labels_are_named_and_choices_listed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("s\ty\nx\t1\n")
    assert read_examples(task(**TEXTS, labels={"1": "yes", "0": "no"}), path)[0].label == "yes"
    path.write_text('{"q": "Who?", "c": ["a", "b"], "y": 1}\n')
    columns = {"text": "q", "choices": "c", "label": "y"}
    found = read_examples(task(kind="multiple_choice", format="jsonl", columns=columns), path)
    assert found[0].choices == ("a", "b") and found[0].label == "1"


def test_sentences_and_paragraphs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("-DOCSTART- O\n\nEU I-ORG\nrejects O\n\n\nPeter I-PER\n")
    assert [(one.words, one.tags) for one in read_examples(task(**TAGS), path)] == [
        (("EU", "rejects"), ("I-ORG", "O")),
        (("Peter",), ("I-PER",)),
    ]
    path.write_text("10\u00a0000  O\r\nEUR O\r\n\r\nin O\n", encoding="utf-8")  # columns end at spaces that break lines
    assert [one.words for one in read_examples(task(**TAGS), path)] == [("10\u00a0000", "EUR"), ("in",)]
    path.write_text(squad("Ann met Bob.", ("Bob", 8)))
    assert read_examples(task(**ANSWERS), path)[0].answers == (("Bob", 8),)


@pytest.mark.parametrize(
    ("settings", "content", "message"),
    [
        (TEXTS, b"", "empty"),
        (TEXTS, b"s\ty\n", "no examples"),
        (TEXTS, b"s\ty\na\t1\n\xff\t0\n", ":3: invalid UTF-8"),
        (TEXTS, b"s\tz\na\t1\n", ":2: no y; the line has s, z"),
        (TEXTS, b"s,y\na,1\n", "wrong delimiter"),
        (TEXTS, b"s\ty\na\t1\tb\n", ":2: 3 columns, the first line has 2"),
        (TEXTS | {"labels": ["0", "1"]}, b"s\ty\na\t2\n", ':2: unknown label "2"; the task has 0, 1'),
        (TEXTS, b"s\ty\na\t\n", ":2: the label is empty"),
        (NUMBERS, b"a,b,x\n", "not a number"),
        (NUMBERS, b"a,b,6\n", "outside of 0.0 to 5.0"),
        (NUMBERS | {"range": None}, b"a,b,1\na,b,inf\n", ':2: the score "inf" is not finite'),
        (NUMBERS, b'a,b,1\na,"b,6\nc,d,2\n', ":2: a quote that begins in this row is not closed; see `quoted`"),
        (TEXTS | {"format": "jsonl"}, b'{"s": "a"}\n', ":1: no y; the line has s"),
        (TEXTS | {"format": "jsonl"}, b'{"s": \n', ":1: no JSON"),
        (TEXTS | {"format": "jsonl"}, b'{"s": "a", "y": null}\n', ":1: y is null; write a value"),
        (TEXTS | {"format": "jsonl"}, b"1\n", "is a JSON object"),
        (TEXTS | {"format": "jsonl"}, b'[\n{"s": "a", "y": "b"}]', ":1: the file is one JSON value: write a list"),
        (TAGS, b"EU I-ORG\nrejects\n", ":2: 1 columns"),
        (TAGS | {"scheme": None}, b"EU\tNN\nrejects\t\n", ":2: the tag is empty"),
        (TAGS | {"scheme": None}, b"EU\tNN\n\tNN\n", ":2: the word is empty"),
        (ANSWERS, squad("Ann met Bob.", ("Bob", 7)).encode(), 'the answer "Bob" is not at character 7'),
        (ANSWERS, squad("Ann met Bob.").encode(), "unanswerable"),
        (ANSWERS, b'{"data": [{"title": 1}]}', "'paragraphs' is missing"),
        (ANSWERS, b'{"data": [{"paragraphs": [{"qas": [{}]}]}]}', ": article 0, paragraph 0, question None: not in"),
        (ANSWERS, b'{"data": [{"paragraphs": [1]}]}', ": article 0, paragraph 0: not in the form"),
        (ANSWERS, b'{"data": ', "no JSON"),
        (ANSWERS, b'{"data": ' + b"[" * 100_000, "no JSON"),
        (ANSWERS, squad("Ann met Bob.", ("Bob", 8)).replace(" 8}", " Infinity}").encode(), "expected a finite number"),
        (ANSWERS, squad("Ann met Bob.", ("Bob", 8)).replace(" 8}", ' "8"}').encode(), '`answer_start` is "8"'),
        (ANSWERS, squad("Ann met Bob.", ("Bob", 8)).replace("q1", "\\ud800").encode(), "surrogate"),
        (TEXTS | {"format": "jsonl"}, b'{"s": "a", "y": "\\ud83d\\ude00"}\n{"s": "a", "y": "\\udc00"}', ":2: half"),
        (TEXTS | {"format": "jsonl"}, b'{"s": "a", "y": NaN}', ":1: no JSON"),
    ],
)
def test_bad_data_is_refused_with_its_place(
    tmp_path: Path, settings: dict[str, Any], content: bytes, message: str
) -> None:
    path = tmp_path / "f"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_examples(task(**settings), path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_broken_lines_are_left_out_if_the_task_says_so(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("s\ty\na\t1\nb\nc\t0\n")
    assert [one.text for one in read_examples(task(**TEXTS, skip_broken=True), path)] == ["a", "c"]


def test_a_test_file_may_lack_labels(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("s\na\n")
    assert read_examples(task(**TEXTS), path, labelled=False)[0].label is None
    with pytest.raises(DataError, match="no y; the line has s"):
        read_examples(task(**TEXTS), path)
    for name, rows in {"train": "a\t1\n", "dev": "a\t0\n", "test": "a\t1\nb\t\n"}.items():
        (tmp_path / name).write_text("s\ty\n" + rows)
    with pytest.raises(DataError, match="test:3: the label is empty"):
        read_files(task(**TEXTS, test="test"), tmp_path)
    lines = TEXTS | {"format": "jsonl"}
    for name in ("train", "dev", "test"):
        (tmp_path / name).write_text('{"s": "a", "y": "1"}\n{"s": "b"}\n'[: None if name == "test" else 21])
    with pytest.raises(DataError, match="test:2: no label, but other examples have one"):
        read_files(task(**lines, test="test"), tmp_path)


def test_doubtful_examples_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "f"
    path.write_text("a,b,1\na,,2\n ,b,3\n")
    read_examples(task(**NUMBERS), path)
    assert caplog.messages == [f"{path}: 2 examples with an empty text (the first: {path}:2)"]
    caplog.clear()
    content = json.loads(squad("Ann met Bob.", ("Bob", 8)))
    content["data"] *= 2
    path.write_text(json.dumps(content))
    read_examples(task(**ANSWERS), path)
    place = "article 1, paragraph 0, question q1"
    assert caplog.messages == [f"{path}: 1 example with the id of an earlier one (the first: {path}: {place})"]
