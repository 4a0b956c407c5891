"""Question answering: windows, positions, the best legal span, no answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.kinds.spans import QuestionAnswering, best_span
from ctxlm_ds.apps.downstream.prepare import load_tokenizer
from ctxlm_ds.apps.downstream.task import TaskDescription
from tests.downstream_models import write_bert

CONTEXT = "the film was good . " * 5 + "Ann met Paris . " + "a bad film . " * 5


def make(tmp_path: Path, unanswerable: bool = False) -> QuestionAnswering:
    task = TaskDescription(
        kind="question_answering", format="squad", train="t", dev="d", unanswerable=unanswerable, max_answer_length=3
    )
    return QuestionAnswering(task, load_tokenizer(write_bert(tmp_path), False), [], 24)


def example(answer: str) -> Example:
    answers = ((answer, CONTEXT.index(answer)),) if answer else ()
    return Example("t:1", CONTEXT, "who met Paris ?", answers=answers, identifier="q")


def test_positions_of_the_answer_give_the_answer_back(tmp_path: Path) -> None:
    kind = make(tmp_path)
    examples = [example("Ann met"), example("bad film")]
    features = kind.features(examples)
    assert len(features) > 4 and max(len(row["input_ids"]) for row in features.rows) == 24
    starts, ends = np.zeros((2, len(features), 24))
    found = 0
    for at, row in enumerate(features.rows):
        if row["start_positions"] > 0:
            found += 1
            starts[at, row["start_positions"]] = ends[at, row["end_positions"]] = 5.0
    assert found >= 2
    predictions = kind.predict((starts, ends), features)
    assert [one.value for one in predictions] == ["Ann met", "bad film"]
    assert kind.score(predictions, examples) == {"f1": 1.0, "exact_match": 1.0}
    assert kind.is_right(predictions[0], examples[0]) and not kind.is_right(predictions[0], examples[1])


def test_no_answer_is_given_if_it_leads(tmp_path: Path) -> None:
    kind = make(tmp_path, unanswerable=True)
    features = kind.features([example("")])
    assert all(row["start_positions"] == row["end_positions"] == 0 for row in features.rows)
    starts, ends = np.zeros((2, len(features), 24))
    starts[:, 0] = ends[:, 0] = 3.0
    assert kind.predict((starts, ends), features)[0].value == ""
    starts[1, 8] = ends[1, 8] = 4.0
    assert kind.predict((starts, ends), features)[0].value != ""


def test_a_long_question_is_cut(tmp_path: Path) -> None:
    kind = make(tmp_path)
    features = kind.features([Example("t:1", CONTEXT, "who met Ann ? " * 30, answers=(("Ann", CONTEXT.index("Ann")),))])
    for row, source in zip(features.rows, features.sources, strict=True):
        assert sum(span is not None for span in source["spans"]) <= len(row["input_ids"]) - 12 - 3
    assert any(row["start_positions"] for row in features.rows)


@pytest.mark.parametrize("seed", range(5))
def test_the_best_span_is_the_best_of_all(seed: int) -> None:
    generator = np.random.default_rng(seed)
    start, end = generator.normal(size=(2, 12))
    allowed = generator.random(12) < 0.7
    every = {
        (first, last): start[first] + end[last]
        for first in range(12)
        for last in range(first, min(12, first + 4))
        if allowed[first] and allowed[last]
    }
    best = max(every, key=lambda pair: every[pair])
    assert best_span(start, end, allowed, 4) == (pytest.approx(every[best]), *best)
