"""tools/static_vectors.py: the same text gives the same file, which the readers of features take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ctxlm_ds.apps.downstream.features.static import StaticVectors
from ctxlm_ds.commands.static_vectors import main
from ctxlm_ds.errors import ConfigError

TEXT = "The film was good. The film was bad.\nAnn met the film.\n"


def run(monkeypatch: pytest.MonkeyPatch, *options: object) -> None:
    monkeypatch.setattr(sys, "argv", ["static_vectors.py", *map(str, options)])
    main()


def test_the_same_text_gives_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 5)
    base = ["--input", tmp_path / "text.txt", "--width", 6, "--min-count", 2, "--epochs", 2]
    for name in ("first", "second"):
        run(monkeypatch, *base, "--output", tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    found = StaticVectors.read(tmp_path / "first")
    assert found.width == 6 and {"The", "the", "film", "."} <= set(found.rows)
    run(monkeypatch, *base, "--lower", "--max-words", 8, "--output", tmp_path / "third")
    assert set(StaticVectors.read(tmp_path / "third").rows) == {"the", "film", "was", "."}
    with pytest.raises(ConfigError, match="--min-count 1000"):
        run(monkeypatch, *base, "--min-count", 1000, "--output", tmp_path / "fourth")
