"""tools/train_tokenizer.py: the same command again is done at once, a killed one leaves no folder or a whole one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ctxlm_ds.apps.text.tokenizers import build_parser, main
from ctxlm_ds.errors import CtxlmError
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import tokenizer_types
from tests.unit.tokenizers.test_report import TEXTS

TOOLS = Path(__file__).parents[4] / "tools"


@pytest.mark.parametrize("name", tokenizer_types())
def test_every_type_can_be_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The input is missing: a known type gets as far as that."""
    assert re.search(rf"\b{name}\b", build_parser().format_help())
    words = ["--input", str(tmp_path / "none.txt"), "--output-dir", str(tmp_path / "tok"), "--type"]
    monkeypatch.setattr(sys, "argv", ["train_tokenizer.py", *words, name])
    with pytest.raises(CtxlmError, match=r"none\.txt"):
        main()
    monkeypatch.setattr(sys, "argv", ["train_tokenizer.py", *words, f"{name}2"])
    with pytest.raises(SystemExit):
        main()
    assert f"--type {name}2: choose one of wordpiece" in capsys.readouterr().err


def test_the_same_command_again_is_done_at_once(tmp_path: Path) -> None:
    corpus, folder = tmp_path / "corpus.txt", tmp_path / "tokenizer"
    corpus.write_text("\n\n".join(TEXTS))
    words = ["--input", str(corpus), "--type", "wordpiece", "--vocab-size", "400", "--output-dir", str(folder)]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOLS / "train_tokenizer.py"), *words, *more]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run().returncode == 0
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = run()
    assert again.returncode == 0 and "complete already" in again.stdout
    other = run("--cased")
    assert other.returncode == 2 and "lowercase true -> false" in other.stderr
    corpus.write_text("another text\n" * 50)
    assert "made differently: input" in run().stderr
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    with open(file, "w", encoding="utf-8") as handle:
        for number, text in enumerate(TEXTS):
            handle.write(json.dumps({"text": text, "lang": "de" if number % 3 == 0 else "en"}) + "\n")
        handle.write("{not json\n")
    return file


def test_a_killed_training_leaves_no_folder(tmp_path: Path, corpus: Path) -> None:
    """kill -9 while it trains, and as soon as it writes: the folder is not there, or it is whole."""
    for moment in ("*.jsonl", "*.partial-*", "*.partial-*/tokenizer.json"):
        folder = tmp_path / str(len(moment)) / "tok"
        folder.parent.mkdir()
        (folder.parent / "begin.jsonl").touch()
        command = [sys.executable, str(TOOLS / "train_tokenizer.py"), "--input", str(corpus), "--type", "unigram"]
        command += ["--vocab-size", "400", "--max-bad-records", "1", "--output-dir", str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not list(folder.parent.glob(moment)):
            time.sleep(0.001)
        process.kill()
        process.wait()
        if folder.exists():
            assert load_tokenizer(folder).vocab_size == 400
