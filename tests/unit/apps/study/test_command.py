"""ctxlm study: what is refused before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.apps.study.command import main
from ctxlm_ds.errors import ConfigError


def test_a_size_that_the_study_lacks(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("title: x\nrecipe: bert-docstrings\nclaim: {text: x, source: y, order: [a, b]}\n"
                    "arms: {a: {}, b: {}}\nsizes: {tiny: {budget: {tokens: 1M}}}\n")  # fmt: skip
    with pytest.raises(ConfigError, match="--size base: .*mine.yaml has the sizes tiny"):
        main([str(path), "--size", "base", "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
