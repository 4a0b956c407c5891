"""Scores of predictions: scikit-learn's and scipy's, spans as conlleval, and SQuAD's by its definition."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from ctxlm_ds.apps.downstream.tags import Span, read_spans
from ctxlm_ds.console import logger
from ctxlm_ds.installed import check_extra

UNKNOWN = "(unknown)"
"""Prediction of a model that wrote no label; always wrong."""


def check_packages() -> None:
    """Refuse a missing package of the scores (ConfigError)."""
    check_extra("downstream", ("sklearn", "scipy"))


def classification_scores(
    right: Sequence[str], predicted: Sequence[str], positive: str, metrics: Sequence[str]
) -> dict[str, float]:
    """Return accuracy, F1 of the positive label, macro F1, Matthews correlation, as far as they are asked for."""
    from sklearn.metrics import f1_score, matthews_corrcoef

    labels = sorted({*right, *predicted} - {UNKNOWN})
    makers = {
        "accuracy": lambda: np.mean([one == other for one, other in zip(right, predicted, strict=True)]),
        "f1": lambda: f1_score(right, predicted, labels=[positive], average="macro", zero_division=0),
        "macro_f1": lambda: f1_score(right, predicted, labels=labels, average="macro", zero_division=0),
        "matthews": lambda: matthews_corrcoef(right, predicted),
    }
    return {name: float(makers[name]()) for name in metrics}


def regression_scores(right: Sequence[float], predicted: Sequence[float], metrics: Sequence[str]) -> dict[str, float]:
    """Return Pearson and Spearman correlation (0 if one side is constant) and mean squared error."""
    from scipy import stats

    constant = len(set(right)) == 1 or len(set(predicted)) == 1
    if constant and {*metrics} != {"mse"}:
        logger.warning("all predictions or all right numbers are equal: their correlation is undefined, 0 is given")
    makers = {
        "pearson": lambda: 0.0 if constant else stats.pearsonr(right, predicted).statistic,
        "spearman": lambda: 0.0 if constant else stats.spearmanr(right, predicted).statistic,
        "mse": lambda: np.mean((np.asarray(right) - np.asarray(predicted)) ** 2),
    }
    return {name: float(makers[name]()) for name in metrics}


def tagging_scores(
    right: list[list[str]], predicted: list[list[str]], spans: bool, metrics: Sequence[str]
) -> dict[str, float]:
    """Return precision, recall and F1 of spans as conlleval and seqeval (IOB2), and accuracy of words.

    Without spans (parts of speech), precision, recall and F1 are those of words, which are the accuracy.
    """
    pairs = [pair for sides in zip(right, predicted, strict=True) for pair in zip(*sides, strict=True)]
    accuracy = sum(one == other for one, other in pairs) / len(pairs)
    if not spans:
        return dict.fromkeys(metrics, accuracy)
    expected, found = ([read_spans(tags, "iob2") for tags in side] for side in (right, predicted))
    return span_scores(expected, found, metrics, accuracy=accuracy)


def span_scores(
    right: Sequence[Iterable[Span]], predicted: Sequence[Iterable[Span]], metrics: Sequence[str], **more: float
) -> dict[str, float]:
    """Return precision, recall and F1 of the labelled spans of all examples together (micro-averaged), and `more`."""
    expected, found = ({(at, *span) for at, spans in enumerate(side) for span in spans} for side in (right, predicted))
    common = len(expected & found)
    scores = {
        "f1": 2 * common / max(1, len(expected) + len(found)),
        "precision": common / max(1, len(found)),
        "recall": common / max(1, len(expected)),
        **more,
    }
    return {name: scores[name] for name in metrics}


def normalize_answer(text: str) -> str:
    """Lower a text, remove punctuation, articles and superfluous spaces (SQuAD's evaluation)."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def answer_f1(right: str, predicted: str) -> float:
    """Return the F1 of the words of two answers after normalization; 1 if both are empty."""
    right_words, predicted_words = normalize_answer(right).split(), normalize_answer(predicted).split()
    if not right_words or not predicted_words:
        return float(right_words == predicted_words)
    common = sum((Counter(right_words) & Counter(predicted_words)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted_words), common / len(right_words)
    return 2 * precision * recall / (precision + recall)


def is_exact(right: Sequence[str], predicted: str) -> bool:
    """Return whether an answer is one of the right ones; the empty text is right for a question without any."""
    return answer_scores([right], [predicted], ["exact_match"])["exact_match"] == 1


def answer_scores(right: Sequence[Sequence[str]], predicted: Sequence[str], metrics: Sequence[str]) -> dict[str, float]:
    """Return exact match and F1 of answers, each question judged by the right answer that fits best.

    A question without right answers is answered rightly by the empty text (SQuAD 2.0). Values are between 0 and 1.
    """
    exact = f1 = 0.0
    for answers, answer in zip(right, predicted, strict=True):
        kept = [one for one in answers if normalize_answer(one)] or [""]
        exact += max(float(normalize_answer(one) == normalize_answer(answer)) for one in kept)
        f1 += max(answer_f1(one, answer) for one in kept)
    scores = {"exact_match": exact / len(predicted), "f1": f1 / len(predicted)}
    return {name: scores[name] for name in metrics}
