"""Extractive question answering: a span of a paragraph, or no answer (SQuAD 1.1 and 2.0)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.kinds.base import Features, Kind, Prediction
from ctxlm_ds.apps.downstream.metrics import answer_scores, is_exact


class QuestionAnswering(Kind):
    """Start and end of the answer in windows of the paragraph; a long paragraph has several."""

    auto = "AutoModelForQuestionAnswering"

    def features(self, examples: Sequence[Example]) -> Features:
        questions, contexts = self._questions(examples), [example.text for example in examples]
        special = self.tokenizer.num_special_tokens_to_add(pair=True)
        room = self.max_length - special - self._longest_question()
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
                text = features.examples[owner].text[spans[first][0] : spans[last][1]]
                best[owner] = (total, text)
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
    first = np.where(allowed, start, -np.inf)
    last = np.where(allowed, end, -np.inf)
    table = first[:, None] + last[None, :]
    size = len(start)
    places = np.arange(size)
    length = places[None, :] - places[:, None]
    table[(length < 0) | (length >= max_length)] = -np.inf
    at = int(table.argmax())
    return float(table.flat[at]), at // size, at % size


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
