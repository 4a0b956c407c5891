"""Tasks as text to text, for encoder-decoders: the model reads a template and writes the answer.

Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", appendix D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.kinds.base import IGNORED_LABEL, Features, Kind, Prediction
from ctxlm_ds.apps.downstream.kinds.sequence import Classification
from ctxlm_ds.apps.downstream.kinds.spans import QuestionAnswering
from ctxlm_ds.apps.downstream.metrics import UNKNOWN
from ctxlm_ds.apps.downstream.task import FIELD
from ctxlm_ds.console import counted, logger
from ctxlm_ds.errors import ConfigError, DataError, TokenizerError
from ctxlm_ds.registry import load_object

STEPS_PER_UNIT = 5
"""Numbers are written as multiples of 1/5 (T5's STS-B, which becomes a choice of 26 texts)."""


@dataclass
class TextToText(Kind):
    """A text for a text, generated at evaluation."""

    auto = "AutoModelForSeq2SeqLM"
    collates = "DataCollatorForSeq2Seq"
    beams: int = 1

    @classmethod
    def find_labels(cls, task: Any, train: Sequence[Example]) -> list[str]:
        return Classification.find_labels(task, train) if task.entry.answer == "label" else []

    @cached_property
    def judge(self) -> Kind:
        """The kind of the same task for other models; that of questions if the task is text to text for all."""
        kind = load_object(self.task.entry.runs, f"task kind {self.task.kind}")
        kind = QuestionAnswering if kind is type(self) else kind
        return kind(self.task, self.tokenizer, self.labels, self.max_length)

    @cached_property
    def label_of(self) -> dict[str, str]:
        """Text as the tokenizer gives it back -> label."""
        words = {label: self.task.label_words.get(label, label) for label in self.labels}
        written = {label: self._decode([self._encode_target(word)])[0] for label, word in words.items()}
        found = {text: label for label, text in written.items()}
        for label, text in written.items():
            if not text or found[text] != label:
                raise ConfigError(f"label_words: the tokenizer writes {words[label]!r} as {text!r}, "
                                  "which is empty or another label's text; choose other words")  # fmt: skip
        return found

    def check(self, examples: Sequence[Example]) -> None:
        self.judge.check(examples)
        if self.task.entry.answer == "label" and not self.label_of:
            raise DataError(f"{self.task.train}: no labels")

    def features(self, examples: Sequence[Example]) -> Features:
        encoded = self.tokenizer(self._inputs(examples), truncation=True, max_length=self.max_length)
        rows, cut = [], 0
        for at, example in enumerate(examples):
            target = self._encode_target(self._target(example))
            cut += len(target) > self._longest
            row = {name: encoded[name][at] for name in ("input_ids", "attention_mask")}
            rows.append({**row, "labels": target[: self._longest]})
        cut_inputs = sum(bool(one.overflowing) for one in encoded.encodings)
        if cut_inputs:
            logger.warning("%s cut after %d tokens; see max_length", counted(cut_inputs, "input"), self.max_length)
        if cut:
            logger.warning("%s cut after %d tokens; see max_target_length", counted(cut, "target"), self._longest)
        return Features(rows, [{} for _ in rows], examples)

    def _inputs(self, examples: Sequence[Example]) -> list[str]:
        pair = "pair" in self.task.columns
        defaults = {"span": "question: {pair} context: {text}", "text": "{text} {pair}" if pair else "{text}"}
        other = "sentence1: {text} sentence2: {pair}" if pair else "sentence: {text}"
        template = self.task.template or defaults.get(self.task.entry.answer, other)
        values = [{"text": example.text.strip(), "pair": (example.pair or "").strip()} for example in examples]
        return [FIELD.sub(lambda found, one=one: one[found[1]], template) for one in values]  # type: ignore[misc]

    def _target(self, example: Example) -> str:
        """Return the text to learn; a test file's missing label is empty."""
        if self.task.entry.answer == "span":
            return example.answers[0][0] if example.answers else ""
        if example.label is None:
            return ""
        if self.task.entry.answer == "number":
            return f"{round(float(example.label) * STEPS_PER_UNIT) / STEPS_PER_UNIT:.1f}"
        return self.task.label_words.get(example.label, example.label)

    def _encode_target(self, text: str) -> list[int]:
        ids = list(self.tokenizer(text_target=text)["input_ids"])
        end = self.tokenizer.eos_token_id
        if end is None:
            raise TokenizerError("the tokenizer has no token for the end of a text, which text to text needs; name one")
        return ids if ids and ids[-1] == end else [*ids, end]

    @cached_property
    def _longest(self) -> int:
        """Longest target in tokens; labels and numbers need no more than the longest of them."""
        if self.task.entry.answer != "label":
            return min(self.task.max_target_length, self.max_length - 1)
        needed = max(len(self._encode_target(self.task.label_words.get(name, name))) for name in self.labels)
        if needed > self.max_length - 1:
            raise ConfigError(f"label_words: {needed} tokens, the model writes {self.max_length - 1} at most")
        return needed

    def arguments(self, **given: Any) -> Any:
        return Seq2SeqTrainingArguments(
            predict_with_generate=True, generation_max_length=self._longest + 1, generation_num_beams=self.beams,
            **given,
        )  # fmt: skip

    def trainer(self, **given: Any) -> Any:
        given["data_collator"].model = given["model"]  # it makes the decoder's inputs, because the loss is ours
        return EachExampleOnce(**given, compute_loss_func=mean_over_tokens)

    def predict(self, outputs: Any, features: Features) -> list[Prediction]:
        padded = np.where(outputs < 0, self.tokenizer.pad_token_id, outputs)
        return [self._read(text) for text in self._decode(padded.tolist())]

    def _decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [" ".join(text.split()) for text in self.tokenizer.batch_decode(rows, skip_special_tokens=True)]

    def _read(self, text: str) -> Prediction:
        if self.task.entry.answer == "label":
            return Prediction(self.label_of.get(text, UNKNOWN), {"output": text})
        if self.task.entry.answer == "number":
            return Prediction(self._read_number(text), {"output": text})
        return Prediction(text)

    def _read_number(self, text: str) -> float:
        """Return the number in a text; one below the range if there is none (T5's postprocessor)."""
        low, high = self.task.range or (float("-inf"), float("inf"))
        try:
            value = float(text.replace(" ", ""))
        except ValueError:
            value = float("nan")
        return value if low <= value <= high and abs(value) < float("inf") else (self.task.range or (0.0, 1.0))[0] - 1

    def is_right(self, prediction: Prediction, example: Example) -> bool:
        return self.judge.is_right(prediction, example)

    def score(self, predictions: Sequence[Prediction], examples: Sequence[Example]) -> dict[str, float]:
        return self.judge.score(predictions, examples)


class EachExampleOnce(Seq2SeqTrainer):
    """Seq2SeqTrainer without the examples that fill the last batches of several ranks."""

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **options)


def mean_over_tokens(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return the cross-entropy of the targets' tokens, averaged over those of all ranks."""
    total = torch.nn.functional.cross_entropy(
        outputs["logits"].flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    if num_items_in_batch is None:
        return total / (labels != IGNORED_LABEL).sum()
    return total / torch.as_tensor(num_items_in_batch).sum()  # DataParallel has it once per device
