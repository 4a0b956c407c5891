"""Tasks with one answer per example: classification and regression of texts and pairs, multiple choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.kinds.base import Features, Kind, Prediction, check_label, softmax
from ctxlm_ds.apps.downstream.metrics import classification_scores, regression_scores
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.problems import show_value


class Classification(Kind):
    """One label of a text, or of a pair of texts."""

    auto = "AutoModelForSequenceClassification"
    reads_whole = True

    @classmethod
    def find_labels(cls, task: TaskDescription, train: Sequence[Example]) -> list[str]:
        if isinstance(task.labels, dict):
            return list(dict.fromkeys(task.labels.values()))
        return task.labels or sorted({example.label for example in train if example.label is not None})

    def check(self, examples: Sequence[Example]) -> None:
        if self.task.positive is not None and self.task.positive not in self.labels:
            known = ", ".join(self.labels)
            raise DataError(f"positive: {self.task.positive} is not a label of the training file; it has {known}")
        for example in examples:
            if example.label is not None:
                check_label(example.label, self.labels, example)

    def target(self, example: Example) -> float:
        return self.labels.index(str(example.label))

    def features(self, examples: Sequence[Example]) -> Features:
        firsts = [example.text for example in examples]
        seconds = [example.pair or "" for example in examples] if "pair" in self.task.columns else None
        encoded = self.tokenizer(firsts, seconds, truncation=True, max_length=self.max_length)
        rows: list[dict[str, Any]] = []
        for at, example in enumerate(examples):
            row = {name: values[at] for name, values in encoded.items()}
            rows.append(row if example.label is None else row | {"labels": self.target(example)})
        return Features(rows, [{} for _ in rows], examples)

    def predict(self, outputs: Any, features: Features) -> list[Prediction]:
        probabilities = softmax(outputs)
        return [
            Prediction(self.labels[row.argmax()], dict(zip(self.labels, row.tolist(), strict=True)))
            for row in probabilities
        ]

    def is_right(self, prediction: Prediction, example: Example) -> bool:
        return prediction.value == example.label

    def score(self, predictions: Sequence[Prediction], examples: Sequence[Example]) -> dict[str, float]:
        right = [str(example.label) for example in examples]
        positive = self.task.positive or self.labels[-1]
        return classification_scores(right, [one.value for one in predictions], positive, self.task.judged_by)


class Regression(Classification):
    """One number of a text, or of a pair of texts."""

    @classmethod
    def find_labels(cls, task: TaskDescription, train: Sequence[Example]) -> list[str]:
        return ["score"]

    def check(self, examples: Sequence[Example]) -> None:
        """Accept all: the reader has checked each number."""

    def target(self, example: Example) -> float:
        return float(str(example.label))

    def predict(self, outputs: Any, features: Features) -> list[Prediction]:
        return [Prediction(float(value)) for value in outputs.reshape(-1)]

    def is_right(self, prediction: Prediction, example: Example) -> bool:
        low, high = self.task.range or (0.0, 1.0)
        return abs(prediction.value - float(str(example.label))) <= 0.1 * (high - low)

    def score(self, predictions: Sequence[Prediction], examples: Sequence[Example]) -> dict[str, float]:
        right = [float(str(example.label)) for example in examples]
        return regression_scores(right, [one.value for one in predictions], self.task.judged_by)


class MultipleChoice(Kind):
    """The right one of several continuations of a text (SWAG), or answers to a question (RACE)."""

    auto = "AutoModelForMultipleChoice"
    collates = "DataCollatorForMultipleChoice"
    reads_whole = True

    def check(self, examples: Sequence[Example]) -> None:
        count = len(examples[0].choices)
        for example in examples:
            if len(example.choices) != count:
                raise DataError(f"{example.origin}: {len(example.choices)} choices, the others have {count}")
            if example.label is not None:
                self.target(example)

    def target(self, example: Example) -> int:
        """Return the number of the right choice, from 0."""
        label, count = str(example.label), len(example.choices)
        is_number = label.isascii() and label.isdigit()
        number = ord(label) - ord("A") if len(label) == 1 and label.isupper() else int(label) if is_number else -1
        if not 0 <= number < count:
            known = f"one of the {count} choices (0, 1, … or A, B, …)"
            raise DataError(f"{example.origin}: the label {show_value(label)} is not {known}")
        return number

    def features(self, examples: Sequence[Example]) -> Features:
        rows = []
        for example in examples:
            seconds = [f"{example.pair} {choice}" if example.pair else choice for choice in example.choices]
            firsts = [example.text] * len(seconds)
            row = dict(self.tokenizer(firsts, seconds, truncation="longest_first", max_length=self.max_length))
            # The collator needs a label of each row, also of a test file.
            row["labels"] = 0 if example.label is None else self.target(example)
            rows.append(row)
        return Features(rows, [{} for _ in rows], examples)

    def predict(self, outputs: Any, features: Features) -> list[Prediction]:
        return [Prediction(int(row.argmax()), row.tolist()) for row in softmax(outputs)]

    def is_right(self, prediction: Prediction, example: Example) -> bool:
        return bool(prediction.value == self.target(example))

    def score(self, predictions: Sequence[Prediction], examples: Sequence[Example]) -> dict[str, float]:
        right = [self.is_right(one, example) for one, example in zip(predictions, examples, strict=True)]
        return {"accuracy": float(np.mean(right))}
