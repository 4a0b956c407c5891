"""Tasks with one answer per example: classification and regression of texts and pairs, multiple choice.

Each also has a form for causal models, with GPT-1's input transformations and auxiliary loss (Radford et al. 2018,
"Improving Language Understanding by Generative Pre-Training", sections 3.2 and 3.3); the losses are as in the published
code (openai/finetune-transformer-lm): each is a mean over rows, of a row's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForMaskedLM
from transformers.modeling_outputs import SequenceClassifierOutput

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.kinds.base import IGNORED_LABEL, Features, Kind, Prediction, check_label, softmax
from ctxlm_ds.apps.downstream.kinds.entries import Answer
from ctxlm_ds.apps.downstream.metrics import classification_scores, regression_scores
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.problems import show_value

START, DELIMITER, EXTRACT = "<|start|>", "<|delimiter|>", "<|extract|>"
CLASSIFIER_DROPOUT = 0.1


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
        return [
            Prediction(self.labels[row.argmax()], dict(zip(self.labels, row.tolist(), strict=True)))
            for row in softmax(outputs)
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


@dataclass
class Gpt1Inputs(Kind):
    """Rows of start, text, delimiter, text and extract tokens; the head reads the last one."""

    auto = "AutoModelForCausalLM"
    new_tokens: ClassVar[bool] = True
    lm_weight: float = 0.5

    def __post_init__(self) -> None:
        self.tokenizer.add_tokens([START, DELIMITER, EXTRACT], special_tokens=True)

    def features(self, examples: Sequence[Example]) -> Features:
        special = dict(zip(("start", "delimiter", "extract"),
                           self.tokenizer.convert_tokens_to_ids([START, DELIMITER, EXTRACT]), strict=True))  # fmt: skip
        rows = []
        for example in examples:
            encoded = [self.tokenizer(list(row), add_special_tokens=False)["input_ids"] for row in self._rows(example)]
            ids = [self._join(row, **special) for row in encoded]
            row: dict[str, Any] = {"input_ids": ids, "attention_mask": [[1] * len(one) for one in ids]}
            rows.append(row if example.label is None else {**row, "labels": self.target(example)})
        return Features(rows, [{} for _ in rows], examples)

    def _rows(self, example: Example) -> list[tuple[str, ...]]:
        if example.choices:
            context = f"{example.text} {example.pair}" if example.pair else example.text
            return [(context, choice) for choice in example.choices]
        if "pair" not in self.task.columns:
            return [(example.text,)]
        first, second = example.text, example.pair or ""
        return [(first, second), (second, first)] if self.task.symmetric else [(first, second)]

    def _join(self, segments: list[list[int]], start: int, delimiter: int, extract: int) -> list[int]:
        """Return one row; the longer text is cut first."""
        room = self.max_length - len(segments) - 1
        if len(segments) == 1:
            return [start, *segments[0][:room], extract]
        first, second = segments
        second = second[: max(room - len(first), room // 2)]
        return [start, *first[: room - len(second)], delimiter, *second, extract]

    def configure(self, config: Any) -> None:
        if type(config) in AutoModelForMaskedLM._model_mapping or hasattr(config, "mem_len"):
            raise ConfigError(f"--gpt1-inputs: a model of type {config.model_type} reads in both directions; "
                              "the option is for causal models such as GPT-2")  # fmt: skip
        if self.task.entry.answer == "choice":
            config.num_labels = 1

    def extend(self, base: Any) -> Any:
        return _with_head(base, self.task.entry.answer, self.lm_weight)

    def model(self, folder: Path, config: Any, random: bool) -> Any:
        model = super().model(folder, config, random)
        if len(self.tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(self.tokenizer), mean_resizing=False)
        return model

    def collator(self) -> Any:
        return self._collate

    def _collate(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `attention_mask` [examples, rows, tokens], `labels` [examples]."""
        flat = [{"input_ids": ids} for one in features for ids in one["input_ids"]]
        padded = self.tokenizer.pad(flat, return_tensors="pt")
        shape = (len(features), len(flat) // len(features), -1)
        batch = {name: padded[name].view(shape) for name in ("input_ids", "attention_mask")}
        if all("labels" in one for one in features):
            batch["labels"] = torch.tensor([one["labels"] for one in features])
        return batch


class CausalClassification(Gpt1Inputs, Classification):
    """One label of a text, or of a pair of texts."""


class CausalRegression(Gpt1Inputs, Regression):
    """One number of a text, or of a pair of texts."""


class CausalChoice(Gpt1Inputs, MultipleChoice):
    """The right one of several answers, each a row of context, delimiter and answer."""


def _with_head(base: Any, answer: Answer, lm_weight: float) -> Any:
    """Return transformers' class of a language model with a linear head over the extract token."""

    class WithHead(base):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.score = nn.Linear(self.get_output_embeddings().in_features, config.num_labels, bias=False)
            self.score_dropout = nn.Dropout(getattr(config, "summary_first_dropout", CLASSIFIER_DROPOUT))
            self.post_init()

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
            """Return loss and logits [examples, labels] (or choices); the LM's loss is added in training only."""
            ids, mask = input_ids.flatten(0, 1), attention_mask.flatten(0, 1)
            lm_logits = None
            if self.training and lm_weight > 0 and labels is not None:
                found = super().forward(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=True)
                states, lm_logits = found.hidden_states[-1], found.logits
            else:
                states = self.base_model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
            last = mask.sum(dim=-1) - 1
            extract = states[torch.arange(len(ids), device=ids.device), last]
            logits = self.score(self.score_dropout(extract)).view(*input_ids.shape[:2], -1)
            # Both orders are added: the head has no bias, so the sum of the scores is the score of the sum.
            logits = logits.squeeze(-1) if answer == "choice" else logits.sum(dim=1)
            if labels is None:
                return SequenceClassifierOutput(logits=logits)
            if answer == "number":
                loss = functional.mse_loss(logits.float().squeeze(-1), labels.float())
            else:
                loss = functional.cross_entropy(logits.float(), labels)
            if lm_logits is not None:
                loss = loss + lm_weight * language_model_loss(lm_logits, ids, mask)
            return SequenceClassifierOutput(loss=loss, logits=logits)

    return WithHead


def language_model_loss(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over rows of the mean over a row's tokens of the loss of the next token.

    logits are [rows, tokens, vocabulary], ids and mask (0 for padding) [rows, tokens].
    """
    targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORED_LABEL)
    losses = functional.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), targets, ignore_index=IGNORED_LABEL, reduction="none"
    )
    return (losses.sum(dim=1) / mask[:, 1:].sum(dim=1)).mean()
