"""Classification, regression and multiple choice: features, predictions and scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.kinds.sequence import Classification, MultipleChoice, Regression
from ctxlm_ds.apps.downstream.prepare import load_tokenizer
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.errors import DataError
from tests.downstream_models import sentiment, write_bert


def test_classes_are_numbered_and_read_back(tmp_path: Path) -> None:
    task, examples = sentiment(4)
    labels = Classification.find_labels(task, examples)
    kind = Classification(task, load_tokenizer(write_bert(tmp_path), False), labels, 16)
    features = kind.features(examples)
    assert labels == ["bad", "good"]
    assert [row["labels"] for row in features.rows] == [0, 1, 0, 1]
    assert kind.tokenizer.decode(features[1]["input_ids"]) == "[CLS] the film was very good. [SEP]"
    logits = np.array([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0], [0.0, 2.0]])
    predictions = kind.predict(logits, features)
    assert predictions[0].probabilities["bad"] == pytest.approx(1 / (1 + np.exp(-2)))
    assert kind.score(predictions, examples)["accuracy"] == 0.75
    with pytest.raises(DataError, match=r"dev:7: unknown label .ugly"):
        kind.check([Example("dev:7", "a", label="ugly")])


def test_pairs_have_two_segments_and_numbers_are_kept(tmp_path: Path) -> None:
    columns = {"text": 0, "pair": 1, "label": 2}
    task = TaskDescription(kind="regression", format="csv", header=False, train="t", dev="d", columns=columns)
    kind = Regression(task, load_tokenizer(write_bert(tmp_path), False), ["score"], 16)
    examples = [Example("t:1", "good film", "bad film", "2.5"), Example("t:2", "a", "a", "5")]
    features = kind.features(examples)
    assert features[0]["labels"] == 2.5
    assert features[0]["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    scores = kind.score(kind.predict(np.array([[2.0], [5.0]]), features), examples)
    assert scores["mse"] == pytest.approx(0.125) and scores["pearson"] == pytest.approx(1.0)


def test_choices_are_rows_of_one_example(tmp_path: Path) -> None:
    columns = {"text": "q", "choices": "c", "label": "y"}
    task = TaskDescription(kind="multiple_choice", format="jsonl", train="t", dev="d", columns=columns)
    kind = MultipleChoice(task, load_tokenizer(write_bert(tmp_path), False), [], 16)
    examples = [Example("t:1", "who met Ann ?", label="B", choices=("Paris", "a film", "the film"))]
    kind.check(examples)
    features = kind.features(examples)
    batch = kind.collator()([features[0]])
    assert batch["input_ids"].shape[:2] == (1, 3) and batch["labels"].tolist() == [1]
    assert kind.score(kind.predict(np.array([[0.0, 1.0, 0.5]]), features), examples) == {"accuracy": 1.0}
    for bad, message in (("D", "not one of the 3 choices"), ("x", "not one of the 3 choices")):
        with pytest.raises(DataError, match=message):
            kind.check([Example("t:1", "q", label=bad, choices=("a", "b", "c"))])
    with pytest.raises(DataError, match="2 choices, the others have 3"):
        kind.check([*examples, Example("t:2", "q", label="A", choices=("a", "b"))])
