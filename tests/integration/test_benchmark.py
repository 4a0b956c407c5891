"""tools/benchmark.py measures what it says: both sides do work, and the table has their ratio."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import Prepared
from tests.integration.route import tool
from tests.text import write_corpus

TINY = ("model.vocab_size=400", "training.micro_batch_size=2", "training.precision=fp32")


def table(text: str) -> dict[str, float]:
    return {line.split()[0]: float(line.split()[1].replace(",", "")) for line in text.splitlines()}


def test_steps() -> None:
    figures = table(tool("benchmark.py", "pretrain", "--config", "bert-tiny", "--rounds", 2, "--set", *TINY).stdout)
    assert min(figures["ctxlm_ds"], figures["transformers"], figures["ratio"]) > 0


@pytest.mark.parametrize("family", ["roberta"])
def test_roberta_steps(family: str) -> None:
    done = tool("benchmark.py", "pretrain", "--config", f"{family}-tiny", "--rounds", 1, "--set", *TINY)
    figures = table(done.stdout)
    assert figures["ratio"] == pytest.approx(figures["ctxlm_ds"] / figures["transformers"], rel=0.02)


def test_loader(bert_route: Prepared) -> None:
    data = [f"tokenizer.path={bert_route.tokenizer}", f"data.train=[{bert_route.train}]", "data.seq_length=32"]
    figures = table(tool("benchmark.py", "loader", "--config", "bert-tiny", "--rounds", 1, "--set", *data).stdout)
    assert figures["ctxlm_ds"] > 0 and figures["transformers"] > 0


def test_preprocess(bert_route: Prepared, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl", 40, seed=1)
    arguments = ("--input", tmp_path / "corpus.jsonl", "--tokenizer", bert_route.tokenizer, "--rounds", 1)
    figures = table(tool("benchmark.py", "preprocess", *arguments, "--split-sentences", "--workers", 1).stdout)
    assert figures["ratio"] == pytest.approx(figures["ctxlm_ds"] / figures["encode_batch_fast"], rel=0.02)


def test_merge(bert_route: Prepared, tmp_path: Path) -> None:
    arguments = ("--input", bert_route.train, bert_route.heldout, "--output-dir", tmp_path, "--rounds", 1)
    figures = table(tool("benchmark.py", "merge", *arguments).stdout)
    assert figures["ratio"] == pytest.approx(figures["ctxlm_ds"] / figures["copy"], rel=0.02, abs=0.01)
    assert list(tmp_path.iterdir()) == []


def test_saves(bert_route: Prepared, tmp_path: Path) -> None:
    data = [f"tokenizer.path={bert_route.tokenizer}", f"data.train=[{bert_route.train}]", "data.seq_length=32"]
    words = ("--config", "bert-tiny", "--output-dir", tmp_path, "--rounds", 1, "--steps", 1)
    sizes = (*TINY, "training.global_batch_size=2")
    lines = tool("benchmark.py", "save", *words, "--set", *data, *sizes).stdout.splitlines()
    figures = {line[:18].strip(): float(line[18:].split()[0]) for line in lines}
    names = ["training waits", "in the background", "the first", "complete after", "step", "step during a save"]
    assert list(figures) == ["checkpoint", *names]
    assert min(figures.values()) > 0 and figures["complete after"] > figures["in the background"]
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_is_needed() -> None:
    done = tool("benchmark.py", "pretrain", "--config", "bert-tiny", "--set", "model.vocab_size=null", check=False)
    assert done.returncode == 2 and "model.vocab_size" in done.stderr
