"""The table of `ctxlm`: quick help, every command there, options passed on, misspelt names, completion by shells."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ctxlm_ds import cli as entry
from ctxlm_ds.cli import COMMANDS, completion_script, help_text, main

ROOT = Path(__file__).resolve().parents[2]
SLOW = {"torch", "pydantic", "pydantic_core", "rich", "yaml", "numpy", "transformers", "deepspeed", "difflib"}


def test_help_imports_no_library() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ctxlm_ds.cli", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "ctxlm_ds.console" in imported
    assert imported & SLOW == set()
    assert {name for name in imported if name.startswith("ctxlm_ds.")} == {
        "ctxlm_ds.console", "ctxlm_ds.errors"
    }  # fmt: skip
    assert done.stdout == help_text() + "\n"


def test_every_command_of_the_table_is_a_module() -> None:
    places = {command.place.partition(":")[0] for command in COMMANDS.values()}
    assert [place for place in places if find_spec(f"ctxlm_ds.{place}") is None] == []


def test_a_command_gets_its_options_and_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/ctxlm", "merge"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "usage: ctxlm merge [-h] --input" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["/somewhere/ctxlm", "pretrain", "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert capsys.readouterr().out.startswith("usage: ctxlm pretrain [-h] [--config RECIPE]")


@pytest.mark.parametrize(
    ("name", "advice"), [("pretrian", "did you mean pretrain?"), ("xyz", "ctxlm --help lists the commands")]
)
def test_a_misspelt_command(name: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([name, "--config", "x"])
    assert capsys.readouterr() == ("", f"error: ctxlm has no command {name}; {advice}\n")


def test_the_old_name_of_a_command_warns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["scores", "--help"])
    shown = capsys.readouterr()
    assert shown.out.startswith("usage: ctxlm compare") and "ctxlm scores is now ctxlm compare" in shown.err


def test_without_arguments_the_help_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ctxlm"])
    main()
    assert capsys.readouterr().out.startswith("usage: ctxlm COMMAND")


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(entry, "version", lambda: "1.2.3")
    main(["--version"])
    assert capsys.readouterr().out == "ctxlm 1.2.3\n"


def completed(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    (folder / "ctxlm").write_text(f'#!/bin/sh\nexec {sys.executable} -m ctxlm_ds.cli "$@"\n')
    (folder / "ctxlm").chmod(0o755)
    line = " ".join(f"'{word}'" for word in ("ctxlm", *words))
    bash = completion_script("bash")
    script = f'{bash}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _ctxlm; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", f'PATH={folder}:$PATH\n{script}'], cwd=ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


def test_bash(tmp_path: Path) -> None:
    assert completed(tmp_path, "pre") == ["preprocess", "pretrain"]
    assert completed(tmp_path, "pretrain", "--config", "bert-lap") == [
        "bert-laptop", "bert-laptop-phases"
    ]  # fmt: skip
    assert completed(tmp_path, "pretrain", "--deepspeed_config", "zero3") == ["zero3", "zero3-offload"]
    assert completed(tmp_path, "merge", "--out") == ["--output-prefix"]
    assert completed(tmp_path, "merge", "") == []  # files, by bash itself


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_a_script_names_all(shell: str) -> None:
    script = completion_script(shell)
    assert all(name in script for name in (*COMMANDS, "bert-base", "zero2")) and "@" not in script.replace("[@]", "")
