"""tools/senses.py: a word of a text as a picture and a list."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ctxlm_ds.commands.senses import main
from ctxlm_ds.errors import ConfigError
from tests.downstream_models import write_bert


def test_a_word_is_drawn_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bert(tmp_path / "bert")
    (tmp_path / "text.txt").write_text("Ann met a good film.\n\nThe film was bad in Paris.\n\nA film was good.\n")
    (tmp_path / "glove.txt").write_text("film 1 2\ngood 2 3\nParis -1 0\n")
    options = ["--word", "film", "--features", tmp_path / "bert", "--static", tmp_path / "glove.txt", "--neighbours", 2,
               "--input", tmp_path / "text.txt", "--output", tmp_path / "film.png", "--layers"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["senses.py", *map(str, options), "-1"])
    main()
    shown = capsys.readouterr().out
    assert "static      good, Paris" in shown and shown.count("contextual") == 2 and "a good film ." in shown
    lines = [line.split(":") for line in shown.splitlines() if line.startswith("group ")]
    assert [head for head, _ in lines] == ["group 1 of 2", "group 2 of 2"]
    assert sum(int(text.split()[0]) for _, text in lines) == 3 and "such as" not in shown
    assert all(text.endswith(" of 3 occurrences") for _, text in lines)
    assert (tmp_path / "film.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sys, "argv", ["senses.py", *map(str, options), "mix:2"])
    with pytest.raises(ConfigError, match="--layers mix:2: the picture needs one vector of a word"):
        main()
