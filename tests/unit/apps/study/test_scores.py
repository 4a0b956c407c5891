"""Scores of vectors on tagged words, from files; tests/integration/test_study.py scores a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.apps.study.scores import score
from ctxlm_ds.errors import DataError

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


def test_data_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="blimp"):
        score(tmp_path, "minimal-pairs", tmp_path)
