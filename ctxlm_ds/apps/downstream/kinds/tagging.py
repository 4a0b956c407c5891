"""A tag of each word: named entities, chunks, parts of speech.

A word may have several subwords, and a long sentence is read in several windows. With a conditional random field
(Lafferty et al. 2001) over the scores of first subwords, the model learns which tag follows which (Lample et al. 2016,
"Neural Architectures for Named Entity Recognition", section 2.2); the layer is torchcrf's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ctxlm_ds.apps.downstream.examples import Example, grouped
from ctxlm_ds.apps.downstream.kinds.base import IGNORED_LABEL, Features, Kind, Prediction, check_label, softmax
from ctxlm_ds.apps.downstream.metrics import tagging_scores
from ctxlm_ds.apps.downstream.tags import OUTSIDE, best_sequence, legal_transitions, marginals, read_spans, write_tags
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.installed import check_extra


@dataclass
class Tagging(Kind):
    """One tag per word."""

    auto = "AutoModelForTokenClassification"
    collates = "DataCollatorForTokenClassification"
    train_on: Literal["first", "all"] = "first"
    """Subwords of a word that have a label in training."""
    read_from: Literal["first", "sum"] = "first"
    """Distribution of a word: that of its first subword, or the sum of those of all."""

    @classmethod
    def find_labels(cls, task: TaskDescription, train: Sequence[Example]) -> list[str]:
        if task.scheme is None:
            return sorted({tag for example in train for tag in example.tags})
        types = {span[-1] for example in train for span in read_spans(example.tags, task.scheme, example.origin_of)}
        return ["O", *(tag for name in sorted(types) for tag in write_tags([(0, 2, name)], 2))]

    def check(self, examples: Sequence[Example]) -> None:
        for example in examples:
            for word, tag in enumerate(self._tags(example)):
                check_label(tag, self.labels, example, word)

    def features(self, examples: Sequence[Example]) -> Features:
        sentences = [example.words for example in examples]
        rows, sources = encode_windows(self.tokenizer, sentences, self.max_length, self.task.stride)
        tags = [self.target(example) for example in examples]
        for row, source in zip(rows, sources, strict=True):
            row["labels"] = self._labels(source["words"], tags[source["example"]])
        return Features(rows, sources, examples)

    def target(self, example: Example) -> list[int]:
        return [self.labels.index(tag) for tag in self._tags(example)]

    def predict(self, outputs: Any, features: Features) -> list[Prediction]:
        transitions = legal_transitions(self.labels, self.task.scheme is not None)
        predictions = []
        every = word_places(features.sources, len(features.examples))
        for example, places in zip(features.examples, every, strict=True):
            rows = np.exp(self._without_subwords(example))
            for word, (at, positions) in places.items():
                used = positions[:1] if self.read_from == "first" else positions
                total = softmax(outputs[at, used]).sum(axis=0)
                rows[word] = total / total.sum()
            path = best_sequence(np.log(np.maximum(rows, 1e-30)), transitions)
            chances = rows[range(len(path)), path].tolist()
            predictions.append(Prediction([self.labels[label] for label in path], chances))
        return predictions

    def _without_subwords(self, example: Example) -> NDArray[np.float64]:
        """Return log-probabilities [words, labels] of words that have no place, such as a control character.

        Such a word is outside of spans; if there are no spans, all labels are equal.
        """
        likely = np.array([self.task.scheme is None or label == OUTSIDE for label in self.labels], dtype=np.float64)
        return np.tile(np.log(np.maximum(likely / likely.sum(), 1e-30)), (len(example.words), 1))

    def is_right(self, prediction: Prediction, example: Example) -> bool:
        return bool(prediction.value == self._tags(example))

    def score(self, predictions: Sequence[Prediction], examples: Sequence[Example]) -> dict[str, float]:
        right = [self._tags(example) for example in examples]
        return tagging_scores(
            right, [one.value for one in predictions], self.task.scheme is not None, self.task.judged_by
        )

    def _tags(self, example: Example) -> list[str]:
        """Return the tags to learn: IOB2 also if the file has another scheme."""
        if self.task.scheme is None:
            return list(example.tags)
        return write_tags(read_spans(example.tags, self.task.scheme, example.origin_of), len(example.tags))

    def _labels(self, words: Sequence[int | None], tags: Sequence[int]) -> list[int]:
        return [
            IGNORED_LABEL if word is None or (self.train_on == "first" and word == before) else tags[word]
            for before, word in pairwise([None, *words])
        ]


def encode_windows(
    tokenizer: Any, sentences: Sequence[Sequence[str]], max_length: int, stride: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows of sentences in words, and the `example` and `words` (of each token) of each row.

    A long sentence has several rows, which overlap by `stride` tokens or half of a row.
    """
    room = max_length - tokenizer.num_special_tokens_to_add()
    encoded = tokenizer(
        [list(words) for words in sentences], is_split_into_words=True, truncation=True,
        max_length=max_length, stride=min(stride, room // 2), return_overflowing_tokens=True,
    )  # fmt: skip
    owners = encoded.pop("overflow_to_sample_mapping")
    rows = [{name: values[at] for name, values in encoded.items()} for at in range(len(owners))]
    return rows, [{"example": owner, "words": encoded.word_ids(at)} for at, owner in enumerate(owners)]


def word_places(sources: Sequence[dict[str, Any]], count: int) -> list[dict[int, tuple[int, list[int]]]]:
    """Return for each word of `count` examples its row and positions; of two windows that with more text around it."""
    found: list[dict[int, tuple[int, list[int]]]] = [{} for _ in range(count)]
    margins: list[dict[int, int]] = [{} for _ in range(count)]
    for at, source in enumerate(sources):
        words, owner = source["words"], source["example"]
        for word, positions in subword_positions(words).items():
            margin = min(positions[0], len(words) - 1 - positions[-1])
            if margin > margins[owner].get(word, -1):
                margins[owner][word] = margin
                found[owner][word] = at, positions
    return found


def subword_positions(words: Sequence[int | None]) -> dict[int, list[int]]:
    return grouped((word, place) for place, word in enumerate(words) if word is not None)


@dataclass
class CrfTagging(Tagging):
    """One tag per word, by the best legal sequence of a CRF."""

    def __post_init__(self) -> None:
        if (self.train_on, self.read_from) != ("first", "first"):
            raise ConfigError("--crf: reads the first subword of each word; drop --train-on and --read-from")

    def extend(self, base: Any) -> Any:
        return _with_crf(base)

    def keep_logits(self, outputs: Any, labels: Any) -> Any:
        return outputs[:2]

    def predict(self, outputs: Any, features: Features) -> list[Prediction]:
        emissions, learned = outputs[0], outputs[1][0].astype(np.float64)
        transitions = learned + legal_transitions(self.labels, self.task.scheme is not None)
        predictions = []
        every = word_places(features.sources, len(features.examples))
        for example, places in zip(features.examples, every, strict=True):
            scores = self._without_subwords(example)
            for word, (at, positions) in places.items():
                scores[word] = emissions[at, positions[0]]
            path = best_sequence(scores, transitions)
            chosen = marginals(scores, transitions)[np.arange(len(path)), path]
            predictions.append(Prediction([self.labels[label] for label in path], chosen.tolist()))
        return predictions


def _with_crf(base: Any) -> Any:
    """Return transformers' class for tagging with torchcrf's CRF over the first subwords as its output layer."""
    check_extra("downstream", ["torchcrf"])
    from torchcrf import CRF

    class FirstSubwordCrf(CRF):
        def forward(self, emissions: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
            """Return the mean negative log-likelihood of rows, and the transitions with start and end.

            emissions are [rows, tokens, labels], labels [rows, tokens] IGNORED_LABEL at all but the first subwords.
            """
            scores, tags, mask, has_words = _first_subwords(emissions, labels)
            likelihood = super().forward(scores, tags, mask, "none")
            transitions = self.transitions.new_zeros(self.num_tags + 2, self.num_tags + 2)
            transitions[:-2, :-2] = self.transitions
            transitions[-2, :-2], transitions[:-2, -1] = self.start_transitions, self.end_transitions
            return -(likelihood * has_words).mean(), transitions

    class WithCrf(base):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.crf = FirstSubwordCrf(config.num_labels, batch_first=True)
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            from transformers import initialization

            if isinstance(module, FirstSubwordCrf):  # what its constructor draws, which loading a folder skips
                for parameter in module.parameters():
                    initialization.uniform_(parameter, -0.1, 0.1)
            else:
                super()._init_weights(module)

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None, labels: Any = None) -> Any:
            """Return the loss and, for evaluation, scores [rows, tokens, labels] and transitions of each row."""
            segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
            emissions = super().forward(input_ids=input_ids, attention_mask=attention_mask, **segments).logits.float()
            loss, transitions = self.crf(emissions, labels)
            if self.training:
                return {"loss": loss}
            return {"loss": loss, "logits": emissions, "transitions": transitions.expand(len(emissions), -1, -1)}

    return WithCrf


def _first_subwords(emissions: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return scores [rows, words, labels], tags and mask [rows, words], and which rows have words."""
    counts = (labels != IGNORED_LABEL).sum(dim=1)
    longest = max(1, int(counts.max()))
    order = torch.argsort((labels == IGNORED_LABEL).to(torch.uint8), dim=1, stable=True)[:, :longest]
    mask = torch.arange(longest, device=labels.device)[None, :] < counts[:, None]
    mask[:, 0] = True  # torchcrf wants a word in each row
    scores = emissions.gather(1, order[..., None].expand(-1, -1, emissions.shape[-1]))
    return scores, labels.gather(1, order).clamp(min=0), mask, counts > 0
