"""Scores of vectors on tagged words, from files; tests/integration/test_study.py scores a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.apps.downstream.results import PREDICTIONS, Point
from ctxlm_ds.apps.study.scores import RATES, fine_tuned, score
from ctxlm_ds.errors import DataError
from tests.downstream_models import write_bert

TAGS = {"the": "DT", "house": "NN", "falls": "VB", "old": "JJ"}


def test_static_vectors_are_probed(tmp_path: Path) -> None:
    folder = tmp_path / "conll2003"
    folder.mkdir()
    sentence = "\n".join(f"{word} {tag}" for word, tag in TAGS.items())
    for name, count in (("train", 60), ("dev", 20)):
        (folder / f"{name}.conll").write_text("\n\n".join([sentence] * count) + "\n")
    vectors = np.random.default_rng(0).normal(size=(len(TAGS), 8))
    lines = (f"{word} {' '.join(map(str, row))}" for word, row in zip(TAGS, vectors, strict=True))
    (tmp_path / "vectors.txt").write_text("\n".join(lines) + "\n")
    found = score(tmp_path / "vectors.txt", "conll2003-pos", tmp_path)
    assert found["accuracy"] == {"0": 1.0} and len(found["items"]["best-layer"]) == 20
    # Each word has one tag, so control tags are read as well.
    assert found["selectivity"] == pytest.approx(0.0, abs=0.3)


def test_fine_tuned_tags_are_judged_in_the_scheme_of_the_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has IOB1, in which a span begins with I; the best rate's predictions, in IOB2, are right."""
    folder = tmp_path / "conll2003"
    folder.mkdir()
    sentence = "Ann NNP I-NP I-PER\nmet VBD I-VP O\nParis NNP I-NP I-LOC\nfilms NNS I-NP I-LOC\n"
    for name in ("train", "dev"):
        (folder / f"{name}.conll").write_text(f"{sentence}\nthe DT I-NP O\n")

    def run_point(model: Path, kind: Any, sets: Any, point: Point, settings: Any, output: Path, recorded: Any) -> None:
        output.mkdir(parents=True)
        found = [["B-PER", "O", "B-LOC", "I-LOC"], ["O"]] if point.learning_rate == RATES[1] else [["O"] * 4, ["O"]]
        lines = (json.dumps({"prediction": tags}) + "\n" for tags in found)
        (output / PREDICTIONS.format("dev")).write_text("".join(lines))

    monkeypatch.setattr("ctxlm_ds.apps.downstream.fit.run_point", run_point)
    model = write_bert(tmp_path / "hf")
    assert np.mean(fine_tuned(model, "conll2003-ner", tmp_path, seed=1)) == 1.0


def test_data_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="blimp"):
        score(tmp_path, "minimal-pairs", tmp_path)
