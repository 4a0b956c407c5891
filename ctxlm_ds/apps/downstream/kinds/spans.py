"""Spans: the answer to a question in a paragraph, or none (SQuAD 1.1 and 2.0), and labelled spans of words.

Labelled spans may be nested: all spans up to a length are classified. A span is its first and last token's states, an
attention-weighted sum of all its states, and an embedding of its width (Lee et al. 2017, "End-to-end Neural Coreference
Resolution", section 3.2; over BERT: Joshi et al. 2019 and 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.kinds.base import IGNORED_LABEL, Features, Kind, Prediction, check_label, softmax
from ctxlm_ds.apps.downstream.kinds.tagging import encode_windows, subword_positions
from ctxlm_ds.apps.downstream.metrics import answer_scores, is_exact, span_scores
from ctxlm_ds.apps.downstream.tags import OUTSIDE, Span, read_spans
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.console import counted, logger
from ctxlm_ds.errors import ConfigError

WIDTH_SIZE, HIDDEN_SIZE, DROPOUT = 20, 150, 0.2
"""Size of the embedding of widths and of the two hidden layers, and dropout (Lee et al. 2017, section 7)."""
SPAN_INPUTS = ("span_starts", "span_ends", "span_widths", "labels")


class QuestionAnswering(Kind):
    """Start and end of the answer in windows of the paragraph; a long paragraph has several."""

    auto = "AutoModelForQuestionAnswering"

    def features(self, examples: Sequence[Example]) -> Features:
        questions, contexts = self._questions(examples), [example.text for example in examples]
        room = self.max_length - self.tokenizer.num_special_tokens_to_add(pair=True) - self._longest_question()
        encoded = self.tokenizer(
            questions, contexts, truncation="only_second", max_length=self.max_length,
            stride=min(self.task.stride, room // 2), return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )  # fmt: skip
        owners, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
        rows, sources = [], []
        for at, owner in enumerate(owners):
            row = {name: values[at] for name, values in encoded.items()}
            ids, cls = row["input_ids"], self.tokenizer.cls_token_id
            null = ids.index(cls) if cls in ids else 0
            spans = [
                (start, end) if segment == 1 else None
                for (start, end), segment in zip(offsets[at], encoded.sequence_ids(at), strict=True)
            ]
            row["start_positions"], row["end_positions"] = _positions(examples[owner], spans, null)
            rows.append(row)
            sources.append({"example": owner, "spans": spans, "null": null})
        return Features(rows, sources, examples)

    def _questions(self, examples: Sequence[Example]) -> list[str]:
        """Return the questions, long ones cut as in BERT's run_squad; half of the input is left for the paragraph."""
        texts = [str(example.pair).lstrip() for example in examples]
        most = self._longest_question()
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        return [
            text if len(places) <= most else text[: places[most - 1][1]]
            for text, places in zip(texts, encoded["offset_mapping"], strict=True)
        ]

    def _longest_question(self) -> int:
        return min(self.task.max_question_length, self.max_length // 2)

    def predict(self, outputs: Any, features: Features) -> list[Prediction]:
        starts, ends = outputs[0], outputs[1]
        best: list[tuple[float, str]] = [(-np.inf, "")] * len(features.examples)
        null = np.full(len(features.examples), np.inf)
        normalizers: list[list[float]] = [[] for _ in features.examples]
        for at, source in enumerate(features.sources):
            owner, spans = source["example"], source["spans"]
            start, end = starts[at, : len(spans)].astype(np.float64), ends[at, : len(spans)].astype(np.float64)
            null[owner] = min(null[owner], start[source["null"]] + end[source["null"]])
            inside = np.array([one is not None for one in spans])
            total, first, last = best_span(start, end, inside, self.task.max_answer_length)
            normalizers[owner].append(float(np.log(np.exp(start - start.max()).sum()) + start.max()
                                            + np.log(np.exp(end - end.max()).sum()) + end.max()))  # fmt: skip
            if total > best[owner][0]:
                best[owner] = (total, features.examples[owner].text[spans[first][0] : spans[last][1]])
        return [self._decide(*one, null[at], max(normalizers[at])) for at, one in enumerate(best)]

    def _decide(self, total: float, text: str, null: float, normalizer: float) -> Prediction:
        if self.task.unanswerable and null - total > self.task.no_answer_threshold:
            return Prediction("", {"no_answer": _exp(null - normalizer)})
        return Prediction(text, {"answer": _exp(total - normalizer), "no_answer_lead": null - total})

    def keep_logits(self, outputs: Any, labels: Any) -> Any:
        return outputs[:2]

    def is_right(self, prediction: Prediction, example: Example) -> bool:
        return is_exact(example.right_texts(), prediction.value)

    def score(self, predictions: Sequence[Prediction], examples: Sequence[Example]) -> dict[str, float]:
        right = [example.right_texts() for example in examples]
        return answer_scores(right, [one.value for one in predictions], self.task.judged_by)


def best_span(
    start: NDArray[np.float64], end: NDArray[np.float64], allowed: NDArray[np.bool_], max_length: int
) -> tuple[float, int, int]:
    """Return the largest sum of start and end logit, and its positions: start <= end, at most `max_length` tokens.

    Only `allowed` positions (tokens of the paragraph) count; the sum is -inf if there are none.
    """
    first, last = (np.where(allowed, side, -np.inf) for side in (start, end))
    pairs = np.ones((len(start), len(start)), dtype=bool)
    table = np.where(np.triu(pairs) & np.tril(pairs, max_length - 1), first[:, None] + last, -np.inf)
    begin, finish = np.unravel_index(table.argmax(), table.shape)
    return float(table[begin, finish]), int(begin), int(finish)


def _positions(example: Example, spans: Sequence[tuple[int, int] | None], null: int) -> tuple[int, int]:
    """Return the tokens of the first right answer in a window; the null position if it is not completely inside."""
    if not example.answers:
        return null, null
    text, begin = example.answers[0]
    finish = begin + len(text)
    inside = [place for place, span in enumerate(spans) if span is not None and span[1] > begin and span[0] < finish]
    shown = [span for span in spans if span is not None]
    if not inside or shown[0][0] > begin or shown[-1][1] < finish:
        return null, null
    return inside[0], inside[-1]


def _exp(value: float) -> float:
    return float(np.exp(min(0.0, value)))


class SpanClassification(Kind):
    """A label, or none, of each span of words."""

    auto = "AutoModelForTokenClassification"

    @classmethod
    def find_labels(cls, task: TaskDescription, train: Sequence[Example]) -> list[str]:
        return [OUTSIDE, *sorted({label for example in train for _, _, label in _spans(task, example)})]

    def check(self, examples: Sequence[Example]) -> None:
        too_long = total = 0
        for example in examples:
            spans = _spans(self.task, example)
            for start, _, label in spans:
                check_label(label, self.labels[1:], example, start)
            total += len(spans)
            too_long += sum(end - start > self.task.max_span_words for start, end, _ in spans)
        if too_long:
            logger.warning("%d of %s longer than %d words, which are not found; see max_span_words",
                           too_long, counted(total, "span"), self.task.max_span_words)  # fmt: skip

    def features(self, examples: Sequence[Example]) -> Features:
        sentences = [example.words for example in examples]
        rows, sources = encode_windows(self.tokenizer, sentences, self.max_length, self.task.stride)
        for row, source in zip(rows, sources, strict=True):
            words = source.pop("words")
            spans, first, last = self._candidates(words)
            row |= {"span_starts": first, "span_ends": last, "span_widths": spans[:, 1] - spans[:, 0] - 1}
            known = {(start, end): label for start, end, label in _spans(self.task, examples[source["example"]])}
            labels = [self.labels.index(known.get((start, end), OUTSIDE)) for start, end in spans.tolist()]
            row["labels"] = np.array(labels, dtype=np.int64)
            source |= {"spans": spans, "margins": np.minimum(first, len(words) - 1 - last)}
        return Features(rows, sources, examples)

    def _candidates(self, words: Sequence[int | None]) -> tuple[Any, Any, Any]:
        """Return the spans of a row [spans, 2] (first word, word after the last), their first and last positions."""
        places = subword_positions(words)
        numbers = np.array(list(places), dtype=np.int64)
        widths = numbers[None, :] - numbers[:, None] + 1
        begin, finish = np.nonzero((widths >= 1) & (widths <= self.task.max_span_words))
        spans = np.stack([numbers[begin], numbers[finish] + 1], axis=1)
        first = np.array([positions[0] for positions in places.values()], dtype=np.int64)[begin]
        last = np.array([positions[-1] for positions in places.values()], dtype=np.int64)[finish]
        return spans, first, last

    def extend(self, base: Any) -> Any:
        return _with_span_head(base, self.task.max_span_words)

    def collator(self) -> Any:
        return self._collate

    def _collate(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the tokenizer's batch, and what describes spans [rows, spans]; padding has no label."""
        texts = [{name: value for name, value in one.items() if name not in SPAN_INPUTS} for one in features]
        batch = dict(self.tokenizer.pad(texts, return_tensors="pt"))
        for name in SPAN_INPUTS:
            values = [torch.from_numpy(np.ascontiguousarray(one[name])) for one in features]
            padding = IGNORED_LABEL if name == "labels" else 0
            batch[name] = pad_sequence(values, batch_first=True, padding_value=padding)
        return batch

    def predict(self, outputs: Any, features: Features) -> list[Prediction]:
        best: list[dict[tuple[int, int], tuple[int, int, float]]] = [{} for _ in features.examples]
        for at, source in enumerate(features.sources):
            probabilities = softmax(outputs[at, : len(source["spans"])])
            chosen, found = probabilities.argmax(axis=1), best[source["example"]]
            for number, (start, end) in enumerate(source["spans"].tolist()):
                margin = int(source["margins"][number])  # of two windows, the one with more text around the span
                if margin > found.get((start, end), (-1,))[0]:
                    label = int(chosen[number])
                    found[start, end] = margin, label, float(probabilities[number, label])
        return [self._prediction(found) for found in best]

    def _prediction(self, found: dict[tuple[int, int], tuple[int, int, float]]) -> Prediction:
        spans = [(chance, start, end, label) for (start, end), (_, label, chance) in found.items() if label > 0]
        if self.task.flat:
            by_chance, spans = sorted(spans, key=lambda one: (-one[0], one[1:])), []
            for span in by_chance:
                if all(span[2] <= other[1] or span[1] >= other[2] for other in spans):
                    spans.append(span)
        spans.sort(key=lambda one: one[1:])
        value = [[start, end, self.labels[label]] for _, start, end, label in spans]
        return Prediction(value, [chance for chance, *_ in spans])

    def is_right(self, prediction: Prediction, example: Example) -> bool:
        return set(map(tuple, prediction.value)) == set(_spans(self.task, example))

    def score(self, predictions: Sequence[Prediction], examples: Sequence[Example]) -> dict[str, float]:
        right = [_spans(self.task, example) for example in examples]
        return span_scores(right, [one.value for one in predictions], self.task.judged_by)


def _spans(task: TaskDescription, example: Example) -> Sequence[Span]:
    return example.spans if task.scheme is None else read_spans(example.tags, task.scheme, example.origin_of)


class SpanHead(nn.Module):
    """Scores of the labels of spans."""

    def __init__(self, hidden_size: int, num_labels: int, max_words: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Linear(hidden_size, 1)
        self.width = nn.Embedding(max_words, WIDTH_SIZE)
        self.scorer = nn.Sequential(
            nn.Linear(3 * hidden_size + WIDTH_SIZE, HIDDEN_SIZE), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(HIDDEN_SIZE, num_labels),
        )  # fmt: skip

    def forward(self, states: Any, starts: Any, ends: Any, widths: Any) -> torch.Tensor:
        """Return scores [rows, spans, labels] of states [rows, tokens, hidden].

        First and last token of each span, and its words less one, are [rows, spans].
        """
        places = torch.arange(states.shape[1], device=states.device)
        inside = (places >= starts[..., None]) & (places <= ends[..., None])  # [rows, spans, tokens]
        weights = self.attention(states).transpose(1, 2).masked_fill(~inside, float("-inf")).softmax(dim=-1)
        rows = torch.arange(len(states), device=states.device)[:, None]
        parts = [states[rows, starts], states[rows, ends], weights @ states, self.width(widths)]
        return self.scorer(torch.cat(parts, dim=-1))


def _with_span_head(base: Any, max_words: int) -> Any:
    """Return transformers' class for tagging with scores of spans in place of its output layer."""

    class WithSpanHead(base):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if self.base_model is self:
                raise ConfigError(f"spans: {base.__name__} has no model below its head")
            for name, child in list(self.named_children()):  # several ranks refuse weights that have no gradient
                if child is not self.base_model and any(True for _ in child.parameters()):
                    setattr(self, name, nn.Identity())
            given = getattr(config, "classifier_dropout", None)
            dropout = DROPOUT if given is None else given
            self.span_head = SpanHead(config.hidden_size, config.num_labels, max_words, dropout)
            self.post_init()

        def forward(
            self, input_ids: Any, attention_mask: Any, span_starts: Any, span_ends: Any, span_widths: Any,
            token_type_ids: Any = None, labels: Any = None,
        ) -> Any:  # fmt: skip
            """Return scores [rows, spans, labels] and the loss: a row's is the sum over its spans."""
            segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
            states = self.base_model(input_ids=input_ids, attention_mask=attention_mask, **segments)[0]
            logits = self.span_head(states, span_starts, span_ends, span_widths)
            losses = nn.functional.cross_entropy(
                logits.float().transpose(1, 2), labels, ignore_index=IGNORED_LABEL, reduction="none"
            )
            return {"loss": losses.sum(dim=1).mean(), "logits": logits}

    return WithSpanHead
