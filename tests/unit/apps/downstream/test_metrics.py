"""Scores, against other implementations of the published scorers."""

from __future__ import annotations

import numpy as np
import pytest
from seqeval import metrics as seqeval

from ctxlm_ds.apps.downstream.metrics import (
    answer_f1,
    answer_scores,
    classification_scores,
    normalize_answer,
    regression_scores,
    tagging_scores,
)
from ctxlm_ds.apps.downstream.tags import best_sequence, legal_transitions


def test_classification_by_its_definitions() -> None:
    right = list("aabbbbaabb")
    predicted = list("abbbaabbbb")
    table = np.array(
        [[sum(r == x and p == y for r, p in zip(right, predicted, strict=True)) for y in "ab"] for x in "ab"]
    )
    (tn, fp), (fn, tp) = table
    scores = classification_scores(right, predicted, "b", ["accuracy", "f1", "matthews"])
    assert scores["accuracy"] == pytest.approx((tp + tn) / 10)
    assert scores["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    expected = (tp * tn - fp * fn) / np.sqrt(float((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    assert scores["matthews"] == pytest.approx(expected)


def test_regression_by_its_definitions(caplog: pytest.LogCaptureFixture) -> None:
    right, predicted = [1.0, 2.0, 3.0, 5.0], [1.0, 3.0, 2.0, 9.0]
    scores = regression_scores(right, predicted, ["pearson", "spearman", "mse"])
    assert scores["pearson"] == pytest.approx(np.corrcoef(right, predicted)[0, 1])
    assert scores["spearman"] == pytest.approx(0.8)
    assert scores["mse"] == pytest.approx(18 / 4)
    assert regression_scores(right, [2.0] * 4, ["mse"]) and not caplog.records
    assert regression_scores(right, [2.0] * 4, ["pearson", "spearman"]) == {"pearson": 0.0, "spearman": 0.0}
    assert "their correlation is undefined, 0 is given" in caplog.text


def test_spans_as_seqeval_counts_them() -> None:
    generator = np.random.default_rng(1)
    labels = ["O", "B-A", "I-A", "B-B", "I-B"]
    transitions = legal_transitions(labels, True)
    sides = [
        [[labels[at] for at in best_sequence(generator.normal(size=(7, 5)), transitions)] for _ in range(60)]
        for _ in range(2)
    ]
    scores = tagging_scores(sides[0], sides[1], True, ["f1", "precision", "recall", "accuracy"])
    theirs = {"f1": seqeval.f1_score, "precision": seqeval.precision_score, "recall": seqeval.recall_score,
              "accuracy": seqeval.accuracy_score}  # fmt: skip
    assert scores == pytest.approx({name: float(scorer(*sides)) for name, scorer in theirs.items()})
    assert 0 < scores["f1"] < 1


@pytest.mark.parametrize(
    ("right", "predicted", "f1"),
    [
        ("The Cat's tail.", "cats tail", 1.0),
        ("in 1999, (Paris)", "Paris in the 1999", 1.0),
        ("An apple an apple", "apple", 2 / 3),
        ("a cat", "a dog", 0.0),
        ("the", "", 1.0),
        ("the", "cat", 0.0),
        ("one two three", "two three four five", 4 / 7),
    ],
)
def test_answers_by_squads_definition(right: str, predicted: str, f1: float) -> None:
    assert answer_f1(right, predicted) == pytest.approx(f1)
    assert (normalize_answer(right) == normalize_answer(predicted)) == (
        right in ("The Cat's tail.", "the") and f1 == 1.0
    )


def test_the_best_right_answer_counts_and_none_is_right_without_answers() -> None:
    scores = answer_scores([["a dog", "The cat sat"], [], []], ["cat", "", "cat"], ["exact_match", "f1"])
    assert scores == pytest.approx({"exact_match": 1 / 3, "f1": (2 / 3 + 1.0) / 3})
