"""Classification of spans: nested ones, candidates, windows, the head against its definition, what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ctxlm_ds.apps.downstream.examples import Example, read_examples
from ctxlm_ds.apps.downstream.fit import FitSettings, Point, Tuning, load_config, run_point
from ctxlm_ds.apps.downstream.kinds.spans import SpanClassification
from ctxlm_ds.apps.downstream.prepare import Parts, make_kind, make_sets
from ctxlm_ds.apps.downstream.task import TaskDescription, load_task
from ctxlm_ds.errors import DataError
from tests.downstream_models import write_bert

TASK = TaskDescription(
    kind="span_classification", format="jsonl", train="t", dev="d", columns={"text": "tokens", "label": "spans"},
    max_span_words=3, stride=4,
)  # fmt: skip
NESTED = [
    Example("t:1", words=("the", "unknown", "films", "in", "Paris"),
            spans=((0, 3, "film"), (2, 3, "word"), (4, 5, "place"))),
    Example("t:2", words=("Ann", "\x01", "met"), spans=((0, 3, "film"),)),
    Example("t:3", words=("who", "?")),
]  # fmt: skip
LABELS = ["O", "film", "place", "word"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    return write_bert(tmp_path_factory.mktemp("spans"), **quiet)


def make(folder: Path, examples: list[Example], **changes: Any) -> SpanClassification:
    task = TASK.model_copy(update=changes)
    return make_kind(task, folder, Parts(examples, examples, None, LABELS))  # type: ignore[return-value]


def right_logits(features: Any) -> Any:
    """Logits that are sure of what is right."""
    logits = np.full((len(features), max(len(row["labels"]) for row in features.rows), 4), -100.0)
    for at, row in enumerate(features.rows):
        logits[at, : len(row["labels"])] = 9.0 * np.eye(4)[row["labels"]]
    return logits


def test_all_spans_up_to_a_length_are_candidates_and_nested_ones_are_found(folder: Path) -> None:
    kind = make(folder, NESTED)
    assert SpanClassification.find_labels(TASK, NESTED) == LABELS
    features = kind.features(NESTED)
    assert features.sources[0]["spans"].tolist() == [
        [start, end] for start in range(5) for end in range(start + 1, min(start + 3, 5) + 1)
    ]
    row = features[0]  # [CLS] the un ##known film ##s in Paris [SEP]
    at = features.sources[0]["spans"].tolist().index([0, 3])
    assert [int(row[name][at]) for name in ("span_starts", "span_ends", "span_widths", "labels")] == [1, 5, 2, 1]
    logits = right_logits(features)
    found = kind.predict(logits, features)
    assert found[0].value == [[0, 3, "film"], [2, 3, "word"], [4, 5, "place"]] and min(found[0].probabilities) > 0.99
    assert [one.value for one in found[1:]] == [[[0, 3, "film"]], []]
    assert kind.score(found, NESTED) == {"f1": 1.0, "precision": 1.0, "recall": 1.0}
    logits[0, at] = [5.0, 0.0, 0.0, 0.0]
    logits[2, 0] = [0.0, 5.0, 0.0, 0.0]
    found = kind.predict(logits, features)
    assert kind.score(found, NESTED) == pytest.approx({"f1": 0.75, "precision": 0.75, "recall": 0.75})
    assert [kind.is_right(*pair) for pair in zip(found, NESTED, strict=True)] == [False, True, False]


def test_flat_tasks_keep_the_more_probable_of_two_that_overlap(folder: Path) -> None:
    features = make(folder, NESTED).features(NESTED)
    logits = right_logits(features)
    at = features.sources[0]["spans"].tolist().index([2, 3])
    logits[0, at] = [0.0, 0.0, 0.0, 20.0]
    found = make(folder, NESTED, flat=True).predict(logits, features)
    assert found[0].value == [[2, 3, "word"], [4, 5, "place"]]


def test_long_sentences_have_windows(folder: Path) -> None:
    words = ("the", "film", "was", "good", ".", "Ann", "met", "a", "bad", "film") * 5
    spans = tuple((at, at + 2, "film") for at in range(0, 48, 3))
    examples = [Example("t:1", words=words, spans=spans)]
    kind = make(folder, examples, max_length=16)
    features = kind.features(examples)
    assert len(features) > 4
    assert kind.score(kind.predict(right_logits(features), features), examples)["f1"] == 1.0


def test_conll_columns_are_spans(tmp_path: Path) -> None:
    _, task = load_task("conll2003-spans")
    (tmp_path / "train.conll").write_text("Ann N N I-PER\nmet V V O\nParis N N I-LOC\nAnn N N B-LOC\n")
    examples = read_examples(task, tmp_path / "train.conll")
    assert SpanClassification.find_labels(task, examples) == ["O", "LOC", "PER"]
    kind = SpanClassification(task, None, ["O", "LOC", "PER"], 16)
    kind.check(examples)
    assert kind.is_right(type(kind)._prediction(kind, {(0, 1): (1, 2, 0.9), (2, 3): (1, 1, 0.9), (3, 4): (1, 1, 0.8)}),
                         examples[0])  # fmt: skip


def test_the_loss_is_that_of_the_definition(folder: Path) -> None:
    """Span by span in float64 from the encoder's states: ends, attention-weighted sum, width; summed over a row."""
    kind = make(folder, NESTED)
    model = kind.model(folder, load_config(folder, kind), random=False)
    features = kind.features(NESTED)
    found = model(**kind.collator()(features.rows))
    head = model.span_head.double()
    total = 0.0
    for at, row in enumerate(features.rows):
        states = model.bert(input_ids=torch.tensor([row["input_ids"]]))[0][0].double()
        for number in range(len(row["labels"])):
            first, last = int(row["span_starts"][number]), int(row["span_ends"][number])
            inner = states[first : last + 1]
            weights = torch.softmax(head.attention(inner)[:, 0], 0)
            width = head.width.weight[int(row["span_widths"][number])]
            scores = head.scorer(torch.cat([inner[0], inner[-1], weights @ inner, width]))
            assert torch.allclose(found["logits"][at, number].double(), scores, atol=1e-5)
            total -= scores.log_softmax(0)[row["labels"][number]].item()
    assert found["loss"].item() == pytest.approx(total / 3, rel=1e-5)


@pytest.mark.parametrize("tuning", [Tuning(layers=0), Tuning(layer_decay=0.9)])
def test_a_run_learns_saves_and_is_read_again(folder: Path, tmp_path: Path, tuning: Tuning) -> None:
    examples = NESTED * 4
    kind = make(folder, examples)
    sets = make_sets(kind, Parts(examples, examples, examples[:2], LABELS))
    settings = FitSettings(tuning, save_model=True, early_stopping=9)
    result = run_point(folder, kind, sets, Point(4, 1e-2, 6, 1), settings, tmp_path / "out", {})
    losses = [line["loss"] for line in result["log"] if "loss" in line]
    assert losses[-1] < losses[0] / 2
    saved = tmp_path / "out" / "model"
    again = make(saved, examples)
    model = again.model(saved, load_config(saved, again), random=False).eval()
    logits = model(**again.collator()(again.features(NESTED).rows))["logits"].detach().numpy()
    lines = [json.loads(line) for line in (tmp_path / "out" / "dev_predictions.jsonl").read_text().splitlines()]
    assert [one.value for one in again.predict(logits, again.features(NESTED))] == [
        line["prediction"] for line in lines[:3]
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"tokens": "Ann met", "spans": []}, "tokens is a list of words"),
        ({"tokens": ["Ann"]}, r"spans is a list of \[start, end, label\]"),
        ({"tokens": ["Ann"], "spans": [[0, 0, "A"]]}, "end is the word after the last"),
        ({"tokens": ["Ann"], "spans": [[0, 2, "A"]]}, "not within the 1 words"),
        ({"tokens": ["Ann"], "spans": [[0, "1", "A"]]}, "two numbers and a text"),
        ({"tokens": ["Ann"], "spans": [[0, 1, "A"], [0, 1, "B"]]}, "two labels, A and B"),
    ],
)
def test_bad_lines_are_refused(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"tokens": ["Ann", "met"], "spans": [[0, 1, "A"]]}\n')
    assert read_examples(TASK, path)[0].spans == ((0, 1, "A"),)
    path.write_text(path.read_text() + json.dumps(line) + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{message}"):
        read_examples(TASK, path)


def test_an_unknown_label_is_refused(folder: Path) -> None:
    with pytest.raises(
        DataError, match=r'^d:1 \("a"\): unknown label "other"; the training file has film, place, word'
    ):
        make(folder, NESTED).check([Example("d:1", words=("a",), spans=((0, 1, "other"),))])
