"""Tasks over frozen vectors: what is learned, how results look, which tasks have no such model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.features.kinds import (
    FrozenInputs,
    HeadSettings,
    check_known_words,
    collate,
    make_frozen_kind,
    words_of,
)
from ctxlm_ds.apps.downstream.features.options import LayerChoice
from ctxlm_ds.apps.downstream.features.sources import StaticSource
from ctxlm_ds.apps.downstream.fit import FitSettings, Point, run_point
from ctxlm_ds.apps.downstream.prepare import Parts, make_sets
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.errors import ConfigError, DataError
from tests.downstream_models import WORDS, sentiment

TABLE = 3 * np.random.default_rng(1).normal(size=(len(WORDS), 6)).astype(np.float32)
STATIC = StaticSource("vectors.txt", {word: at for at, word in enumerate(WORDS)}, TABLE)
POINT = Point(batch_size=2, learning_rate=5e-2, epochs=4, seed=1)
HEAD = HeadSettings(hidden_size=8, dropout=0.0)


class Layers(StaticSource):
    """Three layers, of which the second knows the words."""

    def __init__(self) -> None:
        super().__init__("layers", STATIC.rows, TABLE)
        self.num_layers = 3

    def vectors(self, sentences: Any) -> Any:
        for (known,) in self.block(sentences):
            yield np.stack([np.zeros_like(known), known, np.ones_like(known)])


def inputs(layers: str = "0", source: Any = STATIC, **settings: Any) -> FrozenInputs:
    return FrozenInputs(source, LayerChoice.parse(layers), **settings)


def tagging() -> tuple[TaskDescription, list[Example]]:
    task = TaskDescription(
        kind="tagging", format="conll", train="t", dev="d", columns={"text": 0, "label": 1}, scheme="iob1"
    )
    sentences = [("Ann", "met", "the", "film"), ("Paris", "was", "in", "a", "film"), ("who", "met", "Ann", "?")] * 5
    tags = {"Ann": "I-PER", "Paris": "I-LOC"}
    return task, [
        Example(f"t:{at}", words=words, tags=tuple(tags.get(word, "O") for word in words), identifier=str(at))
        for at, words in enumerate(sentences)
    ]


def test_a_tagger_learns_and_shows_its_mix(tmp_path: Path) -> None:
    task, examples = tagging()
    parts = Parts(examples, examples, None, ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"])
    kind = make_frozen_kind(task, parts, inputs("mix:all", Layers(), folder=tmp_path), HEAD)
    result = run_point(Path("layers"), kind, make_sets(kind, parts), POINT, FitSettings(), tmp_path / "out", {})
    assert result["dev"]["f1"] >= 0.8
    weights = result["mix"]["input"]["weights"]
    assert sum(weights) == pytest.approx(1, abs=1e-3) and weights[1] == max(weights) and set(result["mix"]) == {"input"}
    examples_of = {"examples": {"dev": len(examples)}}
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == result | examples_of
    lines = (tmp_path / "out" / "dev_predictions.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["prediction"] == ["B-PER", "O", "O", "O"] and len(lines) == len(examples)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_classifier_learns_with_vectors_at_both_places(tmp_path: Path) -> None:
    task, examples = sentiment()
    parts = Parts(examples, examples, None, ["bad", "good"])
    head = HeadSettings(hidden_size=8, dropout=0.0, mix_at="both")
    kind = make_frozen_kind(task, parts, inputs("concat:2", Layers(), static=STATIC), head)
    settings = FitSettings(early_stopping=4)
    result = run_point(Path("layers"), kind, make_sets(kind, parts), POINT, settings, tmp_path / "out", {})
    assert result["dev"]["accuracy"] == 1.0 and "mix" not in result


def test_pairs_and_numbers(tmp_path: Path) -> None:
    columns = {"text": "a", "pair": "b", "label": "y"}
    task = TaskDescription(kind="regression", format="tsv", train="t", dev="d", columns=columns)
    texts = ["the film was good .", "Ann met Paris", ""]
    examples = [
        Example(f"t:{at}", texts[at % 3], texts[at % 2], label=str(float(at % 3 == at % 2)), identifier=str(at))
        for at in range(12)
    ]
    parts = Parts(examples, examples, None, ["score"])
    assert words_of(task, parts)[:2] == [["the", "film", "was", "good", "."]] * 2
    kind = make_frozen_kind(task, parts, inputs(), HEAD)
    features = kind.features(examples)
    found = collate([features[at] for at in (0, 1, 2)])
    assert found["lengths"].tolist() == [[5, 5], [3, 3], [1, 5]] and found["vectors"].shape == (3, 2, 5, 1, 6)
    assert found["labels"].tolist() == [1.0, 1.0, 0.0]
    model = kind.model(Path("v"), None, random=False).eval()
    parts_of_batch = zip(*(found[name].chunk(3) for name in ("vectors", "lengths")), strict=True)  # as DataParallel
    logits = torch.cat([model(*part)["logits"] for part in parts_of_batch])
    torch.testing.assert_close(logits, model(found["vectors"], found["lengths"])["logits"])
    result = run_point(Path("v"), kind, make_sets(kind, parts), POINT, FitSettings(), tmp_path / "out", {})
    assert result["dev"]["pearson"] > 0.9


def test_a_file_without_the_words_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ctxlm_ds")
    check_known_words(STATIC, [["the", "film", "Xyz"], ["good"]])
    assert caplog.messages == ["vectors.txt: has vectors of 75.0 % of the task's words"]
    with pytest.raises(DataError, match=r'vectors\.txt: has none of the task.s words, such as "Xyz"'):
        check_known_words(STATIC, [["Xyz"]])


def test_labels_are_filled_up() -> None:
    rows = [{"vectors": [np.zeros((size, 1, 2), dtype=np.float32)], "labels": [1] * size} for size in (1, 3)]
    assert torch.equal(collate(rows)["labels"], torch.tensor([[1, -100, -100], [1, 1, 1]]))


def test_tasks_without_such_a_model_are_refused() -> None:
    task, examples = sentiment(4)
    parts = Parts(examples, examples, None, ["bad", "good"])
    with pytest.raises(ConfigError, match="--mix-at output: the RNN reads only static vectors"):
        make_frozen_kind(task, parts, inputs(), HeadSettings(mix_at="output"))
    with pytest.raises(ConfigError, match="--layers 1: vectors.txt has 1 layers"):
        inputs("1")
    choice = task.model_copy(update={"kind": "multiple_choice"})
    with pytest.raises(ConfigError, match="tasks of kind multiple_choice are fine-tuned only"):
        make_frozen_kind(choice, parts, inputs(), HEAD)
