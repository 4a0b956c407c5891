"""Answers of a language model to prompts: cloze, few-shot examples, contextual calibration."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.kinds.base import Kind, Prediction, softmax
from ctxlm_ds.apps.downstream.prompt_task import PromptDescription, content_free
from ctxlm_ds.apps.downstream.scoring import Item, Scorer
from ctxlm_ds.console import counted
from ctxlm_ds.errors import ConfigError

logger = logging.getLogger("ctxlm_ds")


@dataclass
class Prompting:
    """A model that answers the prompts of one task.

    Args:
        kind: the task; `max_length` is the longest prompt in tokens.
        prompt: pattern and words.
        scorer: the model.
        mean: score words by the mean log-probability of their tokens, not the sum.
        calibrated: divide by the probabilities after content-free inputs (Zhao et al. 2021; for choices, the pointwise
            mutual information of Holtzman et al. 2021).
    """

    kind: Kind
    prompt: PromptDescription
    scorer: Scorer
    mean: bool = False
    calibrated: bool = False
    _reported_unknown: bool = field(default=False, init=False)

    def predict(self, examples: Sequence[Example], shots: Sequence[Example]) -> list[Prediction]:
        """Return a prediction for each example after the solved examples `shots`."""
        causal = self.scorer.causal
        given = self.prompt.demonstrations(shots, [self._right(one) for one in shots], causal)
        probabilities = self._probabilities(examples, given)
        if self.calibrated:
            neutral = self._neutral(examples, given)
            divided = [row / base for row, base in zip(probabilities, neutral, strict=True)]
            probabilities = [row / row.sum() for row in divided]
        if self.kind.task.entry.answer == "choice":
            return [Prediction(int(row.argmax()), row.tolist()) for row in probabilities]
        labels = self.kind.labels
        return [Prediction(labels[row.argmax()], dict(zip(labels, row.tolist(), strict=True))) for row in probabilities]

    def _neutral(self, examples: Sequence[Example], given: str) -> Iterable[NDArray[np.float64]]:
        """Return the mean probabilities after content-free inputs, for each example."""
        if self.kind.task.entry.answer != "choice":
            mean = np.mean(self._probabilities(content_free(examples[0]), given), axis=0)
            return [mean] * len(examples)
        inputs = [one for example in examples for one in content_free(example)]
        rows, each = self._probabilities(inputs, given), len(inputs) // len(examples)
        return [np.mean(rows[at : at + each], axis=0) for at in range(0, len(rows), each)]

    def _probabilities(self, examples: Sequence[Example], given: str) -> list[NDArray[np.float64]]:
        """Return the probability of each label (or choice) among all of them, for each example."""
        items, counts, cut = [], [], 0
        for example in examples:
            fitting, was_cut = self.fit(example, given)
            items += fitting
            counts.append(len(fitting))
            cut += was_cut
        if cut:
            logger.info("%s shortened to prompts of %d tokens", counted(cut, "example"), self.kind.max_length)
        self._report_unknown(items)
        scores = np.split(self.scorer.scores(items, self.mean), np.cumsum(counts)[:-1])
        return [softmax(row) for row in scores]

    def _report_unknown(self, items: Sequence[Item]) -> None:
        """Warn, once, of words with tokens that the tokenizer does not know."""
        unknown = sum(self.scorer.tokenizer.unk_token_id in item.targets for item in items)
        if unknown and not self._reported_unknown:
            self._reported_unknown = True
            logger.warning("unknown tokens in %d of %d choices are scored like others", unknown, len(items))

    def fit(self, example: Example, given: str) -> tuple[list[Item], bool]:
        """Return an input for each word, and whether the example was shortened for them to fit.

        Raises:
            ConfigError: not even an empty example fits behind the solved ones.
        """
        words, was_cut = self._words(example), False
        while True:
            text = self.prompt.gapped(example, self.scorer.causal)
            items = [self.scorer.item(given + text.before, word, text.after) for word in words]
            excess = max(item.length for item in items) - self.kind.max_length
            if excess <= 0:
                return items, was_cut
            example, was_cut = self._shortened(example, excess), True

    def _shortened(self, example: Example, excess: int) -> Example:
        """Return the example without the last tokens of its longer segment."""
        tokenize = partial(self.scorer.tokenizer, add_special_tokens=False, return_offsets_mapping=True)
        offsets = {name: tokenize(text)["offset_mapping"] for name, text in
                   (("text", example.text), ("pair", example.pair or ""))}  # fmt: skip
        longer = max(offsets, key=lambda name: len(offsets[name]))
        if not offsets[longer]:
            raise ConfigError(f"{example.origin}: the prompt without the example has {excess} tokens more than the "
                              f"longest input ({self.kind.max_length}); lower --shots")  # fmt: skip
        kept = offsets[longer][: max(0, len(offsets[longer]) - excess)]
        text = str(getattr(example, longer))[:-1][: kept[-1][1] if kept else 0]
        return replace(example, text=text) if longer == "text" else replace(example, pair=text)

    def _words(self, example: Example) -> list[str]:
        if self.kind.task.entry.answer == "choice":
            return list(example.choices)
        return [self.prompt.words[label] for label in self.kind.labels]

    def _right(self, example: Example) -> str:
        """Return what belongs into the gap of a training example."""
        words = self._words(example)
        return next(word for at, word in enumerate(words) if self.kind.is_right(self._as_prediction(at), example))

    def _as_prediction(self, at: int) -> Prediction:
        return Prediction(at if self.kind.task.entry.answer == "choice" else self.kind.labels[at])
