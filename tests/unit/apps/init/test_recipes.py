"""Recipes are listed with a line each, shown with their comment and all settings, and compared."""

from __future__ import annotations

from pathlib import Path

from ctxlm_ds.apps.init.recipes import differences, main, summary
from ctxlm_ds.recipe.load import RECIPE_DIR, load_config
from tests.integration.route import call_here


def printed(*words: str) -> list[str]:
    return call_here(main, "ctxlm recipes", *words).stdout.splitlines()


def test_each_has_a_line() -> None:
    lines = printed()
    assert [line.split()[0] for line in lines] == sorted(path.stem for path in RECIPE_DIR.glob("*.yaml"))
    assert printed("list") == lines
    assert all(len(line.split()) > 3 and len(line) < 140 for line in lines)
    assert summary(RECIPE_DIR / "bert-mini.yaml") == "BERT-Mini: 4 layers, 256 wide"


def test_what_is_shown_is_a_recipe(tmp_path: Path) -> None:
    lines = printed("show", "bert-mini", "--set", "training.max_steps=7")
    assert lines[0].startswith("# BERT-Mini") and "  max_steps: 7" in lines
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    assert load_config(tmp_path / "mine.yaml") == load_config("bert-mini", ["training.max_steps=7"])


def test_what_differs() -> None:
    lines = [line.split() for line in printed("diff", "bert-mini", "bert-tiny")]
    assert lines[0] == ["bert-mini", "bert-tiny"] and ["model.num_layers", "4", "2"] in lines
    assert not any(line[0] == "model.vocab_size" for line in lines)
    assert printed("diff", "bert-mini", "bert-mini") == ["the same settings"]
    assert differences({"a.b": 1, "a.c": []}, {"a.b": 1, "a.d": {}}) == [("a.c", "[]", "-"), ("a.d", "-", "{}")]
