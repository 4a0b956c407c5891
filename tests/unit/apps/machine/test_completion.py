"""bash completes commands, recipes, JSON files and options; the other shells' scripts name them too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ctxlm_ds.apps.machine.completion import SCRIPTS, bash
from ctxlm_ds.cli import COMMANDS


def completed(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    (folder / "ctxlm").write_text(f'#!/bin/sh\nexec {sys.executable} -m ctxlm_ds.cli "$@"\n')
    (folder / "ctxlm").chmod(0o755)
    line = " ".join(f"'{word}'" for word in ("ctxlm", *words))
    script = f'{bash()}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _ctxlm; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", f'PATH={folder}:$PATH\n{script}'], cwd=Path(__file__).resolve().parents[4],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


def test_bash(tmp_path: Path) -> None:
    assert completed(tmp_path, "pre") == ["preprocess", "pretrain"]
    assert completed(tmp_path, "pretrain", "--config", "bert-lap") == [
        "bert-laptop", "bert-laptop-phase1", "bert-laptop-phase2"
    ]  # fmt: skip
    assert completed(tmp_path, "pretrain", "--deepspeed_config", "zero3") == ["zero3", "zero3-offload"]
    assert completed(tmp_path, "merge", "--out") == ["--output-prefix"]
    assert completed(tmp_path, "merge", "") == []  # files, by bash itself


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_script_names_all(shell: str) -> None:
    script = SCRIPTS[shell]()
    assert all(name in script for name in (*COMMANDS, "bert-base", "zero2")) and "@" not in script.replace("[@]", "")
