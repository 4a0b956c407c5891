"""Recipes are listed with a line each, shown with their comment and all settings, and compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ctxlm_ds.apps.init.recipes import differences, main, summary
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import RECIPE_DIR, load_config


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["ctxlm recipes", *words])
    main()
    return capsys.readouterr().out.splitlines()


def test_each_has_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(monkeypatch, capsys)
    assert [line.split()[0] for line in lines] == sorted(path.stem for path in RECIPE_DIR.glob("*.yaml"))
    assert printed(monkeypatch, capsys, "list") == lines
    assert all(len(line.split()) > 3 and len(line) < 140 for line in lines)
    assert summary(RECIPE_DIR / "bert-mini.yaml") == "BERT-Mini: 4 layers, 256 wide"


def test_what_is_shown_is_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(monkeypatch, capsys, "show", "bert-mini", "--set", "training.max_steps=7")
    assert lines[0].startswith("# BERT-Mini") and "  max_steps: 7" in lines
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    assert load_config(tmp_path / "mine.yaml") == load_config("bert-mini", ["training.max_steps=7"])


def test_what_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in printed(monkeypatch, capsys, "diff", "bert-mini", "bert-tiny")]
    assert lines[0] == ["bert-mini", "bert-tiny"] and ["model.num_layers", "4", "2"] in lines
    assert not any(line[0] == "model.vocab_size" for line in lines)
    assert printed(monkeypatch, capsys, "diff", "bert-mini", "bert-mini") == ["the same settings"]
    assert differences({"a.b": 1, "a.c": []}, {"a.b": 1, "a.d": {}}) == [("a.c", "[]", "-"), ("a.d", "-", "{}")]


def test_a_misspelt_recipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="did you mean bert-tiny"):
        printed(monkeypatch, capsys, "diff", "bert-mini", "bert-tinny")
