"""Tagging: labels of subwords, windows of long sentences, words read back, legal tags only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.kinds.tagging import CrfTagging, Tagging
from ctxlm_ds.apps.downstream.prepare import Parts, load_tokenizer, make_kind
from ctxlm_ds.apps.downstream.tags import read_spans
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.errors import DataError
from tests.downstream_models import write_bert

TASK = TaskDescription(
    kind="tagging", format="conll", train="t", dev="d", columns={"text": 0, "label": 1}, scheme="iob1", stride=4
)


def make(tmp_path: Path, examples: list[Example], max_length: int = 16, **options: str) -> Tagging:
    labels = Tagging.find_labels(TASK, examples)
    return Tagging(TASK, load_tokenizer(write_bert(tmp_path), True), labels, max_length, **options)  # type: ignore[arg-type]


def test_first_or_all_subwords_have_labels(tmp_path: Path) -> None:
    examples = [Example("t:1", words=("unknown", "films", "Paris"), tags=("I-A", "B-A", "O"))]
    kind = make(tmp_path, examples)
    assert kind.labels == ["O", "B-A", "I-A"]
    row = kind.features(examples)[0]
    tokens = kind.tokenizer.convert_ids_to_tokens(row["input_ids"])
    assert tokens == ["[CLS]", "un", "##known", "film", "##s", "Paris", "[SEP]"]
    assert row["labels"] == [-100, 1, -100, 1, -100, 0, -100]
    every = make(tmp_path, examples, train_on="all")
    assert every.features(examples)[0]["labels"] == [-100, 1, 1, 1, 1, 0, -100]


def test_every_word_of_a_long_sentence_is_predicted_where_it_has_most_text_around(tmp_path: Path) -> None:
    words = tuple(["the", "film", "was", "good", ".", "Ann", "met", "a", "bad", "film", "in", "Paris", "."] * 3)
    examples = [Example("t:1", words=words, tags=("I-A", "O", "B-A") * 13), Example("t:2", words=("Ann",), tags=("O",))]
    kind = make(tmp_path, examples)
    features = kind.features(examples)
    assert len(features) > 4
    logits = np.zeros((len(features), 16, 3))
    for at, row in enumerate(features.rows):
        for place, label in enumerate(row["labels"]):
            if label >= 0:
                logits[at, place, label] = 5.0
    predictions = kind.predict(logits, features)
    assert kind.score(predictions, examples) == {"f1": 1.0, "precision": 1.0, "recall": 1.0, "accuracy": 1.0}
    assert kind.is_right(predictions[0], examples[0]) and not kind.is_right(predictions[1], examples[0])
    # A window's last word is judged by the next window, in which it has words after it.
    last = len(features.sources[0]["words"]) - 2
    logits[0, last] = [9.0, 0.0, 0.0] if logits[0, last, 0] == 0 else [0.0, 9.0, 0.0]
    assert [one.value for one in kind.predict(logits, features)] == [one.value for one in predictions]


@pytest.mark.parametrize("read_from", ["first", "sum"])
def test_predicted_tags_are_legal_for_any_logits(tmp_path: Path, read_from: str) -> None:
    examples = [Example("t:1", words=("Ann", "unknown", "films", "\x01") * 4, tags=("I-A", "I-B", "O", "O") * 4)]
    kind = make(tmp_path, examples, 32, read_from=read_from)
    features = kind.features(examples)
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(size=(len(features), 32, 5)) * 4
        tags = kind.predict(logits, features)[0].value
        assert len(tags) == 16 and isinstance(read_spans(tags, "iob2"), list)


def test_the_probability_is_that_of_the_tag(tmp_path: Path) -> None:
    """A span cannot begin inside one, so the best tag of the word alone is none."""
    examples = [Example("t:1", words=("Ann",), tags=("I-A",))]
    kind = make(tmp_path, examples)
    logits = np.log(np.tile([0.25, 0.05, 0.7], (1, 16, 1)))
    assert kind.labels == ["O", "B-A", "I-A"]
    (prediction,) = kind.predict(logits, kind.features(examples))
    assert prediction.value == ["O"] and prediction.probabilities == pytest.approx([0.25])


def test_a_word_without_subwords_is_outside_of_spans(tmp_path: Path) -> None:
    examples = [Example("t:1", words=("Ann", "\x01", "films"), tags=("I-A", "O", "I-A"))]
    plain = make(tmp_path, examples)
    for kind in (plain, CrfTagging(TASK, plain.tokenizer, plain.labels, 16)):
        features = kind.features(examples)
        logits = np.full((1, 16, 3), -4.0)
        logits[:, :, 1] = logits[:, :, 2] = 4.0
        outputs = logits if kind is plain else (logits, np.zeros((1, 5, 5)))
        prediction = kind.predict(outputs, features)[0]
        assert prediction.value == ["B-A", "O", "B-A"] and prediction.probabilities[1] > 0.99


def test_a_stride_that_is_longer_than_a_row_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    examples = [Example("t:1", words=("Ann",), tags=("O",))]
    parts, folder = Parts(examples, examples, None, ["O"]), write_bert(tmp_path)
    make_kind(TASK, folder, parts)
    make_kind(TaskDescription(**TASK.model_dump(exclude={"stride"})), folder, parts)
    assert not caplog.records
    make_kind(TaskDescription(**TASK.model_dump() | {"stride": 40}), folder, parts)
    assert caplog.messages == ["stride 40: rows have 32 tokens and overlap by half of them"]


def test_a_sum_counts_all_subwords(tmp_path: Path) -> None:
    examples = [Example("t:1", words=("unknown", "Ann"), tags=("O", "I-A"))]
    logits = np.zeros((1, 5, 3))
    logits[0, 1], logits[0, 2] = [1.0, 0.0, 0.0], [0.0, 4.0, 0.0]
    for read_from, tag in (("first", "O"), ("sum", "B-A")):
        kind = make(tmp_path, examples, read_from=read_from)
        assert kind.predict(logits, kind.features(examples))[0].value[0] == tag


def test_an_unknown_tag_is_refused(tmp_path: Path) -> None:
    kind = make(tmp_path, [Example("t:1", words=("a",), tags=("I-A",))])
    with pytest.raises(DataError, match=r'^d:9 \("a"\): unknown tag "B-C"'):
        kind.check([Example("d:9", words=("a",), tags=("I-C",))])
    with pytest.raises(DataError, match=r'^d:11 \("c"\): unknown tag "B-D"'):
        kind.check([Example("d:9", words=("a", "b", "c"), tags=("I-A", "I-A", "I-D"))])
