"""tools/benchmark measures what it says: both sides do work, and the table has their ratio."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.conftest import Prepared
from tests.integration.route import tool
from tests.text import write_corpus

TINY = ("model.vocab_size=400", "training.micro_batch_size=2", "training.precision=fp32")


def table(text: str) -> dict[str, float]:
    return {line.split()[0]: float(line.split()[1].replace(",", "")) for line in text.splitlines()}


STEPS = ("steps", "--rounds", 1, "--micro-batches", 2, "--threads", 1)


def cells(lines: list[str]) -> dict[str, list[str]]:
    """The rows of a table of steps: columns are two spaces apart."""
    rows = [re.split(r" {2,}", line.strip()) for line in lines]
    return {row[0]: row[1:] for row in rows if len(row) > 1}


@pytest.mark.soak
def test_steps() -> None:
    """Every side; the engine goes through DeepSpeed, and launches are not counted on a CPU."""
    done = tool("benchmark", *STEPS, "--config", "bert-tiny", "--dropout", 0.1, "--set", *TINY)
    title, _, *lines, last = done.stdout.splitlines()
    assert title.split(", ")[-2] == "dropout 0.1"
    rows = cells(lines)
    peers = ["bare model", "transformers, fp32", "transformers.Trainer"]
    assert list(rows) == ["ctxlm_ds", *peers, "matrix product"]
    ours = float(rows["ctxlm_ds"][0].split()[0].replace(",", ""))
    for name in peers:
        theirs = float(rows[name][0].split()[0].replace(",", ""))
        assert float(rows[name][1].split()[0]) == pytest.approx(ours / theirs, rel=0.05)
    assert all(row[-2:] == ["-", "-"] for row in rows.values())
    assert all(0 < float(rows[name][3].split()[0]) < 100 for name in ["ctxlm_ds", *peers])
    assert "bare model's" in last


@pytest.mark.parametrize(
    ("words", "dropouts"),
    [(("--dropout", 0.1), ["0.1"]), pytest.param((), ["0.1", "0"], marks=pytest.mark.soak)],
    ids=["one", "both"],
)
def test_steps_of_another_family(words: tuple[object, ...], dropouts: list[str]) -> None:
    """A table for each dropout."""
    sizes = ("num_layers=1", "hidden_size=64", "num_attention_heads=2", "intermediate_size=128")
    small = ["data.seq_length=16", *(f"model.{size}" for size in sizes)]
    done = tool("benchmark", *STEPS, "--config", "gpt2-small", "--against", "bf16", *words, "--set", *TINY, *small)
    lines = done.stdout.splitlines()
    titles = [number for number, line in enumerate(lines) if not line.startswith(" ")]
    assert [lines[number].split(", ")[-2] for number in titles] == [f"dropout {rate}" for rate in dropouts]
    for begin, end in zip(titles, [*titles[1:], len(lines)], strict=True):
        assert list(cells(lines[begin + 2 : end])) == ["ctxlm_ds", "transformers, fp32", "matrix product"]


@pytest.mark.soak
def test_packing() -> None:
    """Four ways, and the ratios are those of the speeds."""
    words = ("--config", "bert-tiny", "--rounds", 1, "--micro-batches", 1, "--dropout", 0, "--threads", 1)
    done = tool("benchmark", "packing", *words, "--set", "training.micro_batch_size=1", "training.precision=fp32")
    rows = cells(done.stdout.splitlines()[2:])
    packed, *padded = ((name, float(row[0].split()[0].replace(",", "")), row) for name, row in rows.items())
    assert packed[0] == "packed into 512" and len(padded) == 3
    for _, speed, row in padded:
        assert float(row[1].split()[0]) == pytest.approx(packed[1] / speed, rel=0.05)


def test_loader(bert_route: Prepared) -> None:
    data = [f"tokenizer.path={bert_route.tokenizer}", f"data.train=[{bert_route.train}]", "data.seq_length=32"]
    figures = table(tool("benchmark", "loader", "--config", "bert-tiny", "--rounds", 1, "--set", *data).stdout)
    assert figures["ctxlm_ds"] > 0 and figures["transformers"] > 0


def test_preprocess(bert_route: Prepared, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl", 40, seed=1)
    arguments = ("--input", tmp_path / "corpus.jsonl", "--tokenizer", bert_route.tokenizer, "--rounds", 1)
    figures = table(tool("benchmark", "preprocess", *arguments, "--split-sentences", "--workers", 1).stdout)
    assert figures["ratio"] == pytest.approx(figures["ctxlm_ds"] / figures["encode_batch_fast"], rel=0.02, abs=0.01)


def test_merge(bert_route: Prepared, tmp_path: Path) -> None:
    arguments = ("--input", bert_route.train, bert_route.heldout, "--output-dir", tmp_path, "--rounds", 1)
    figures = table(tool("benchmark", "merge", *arguments).stdout)
    assert figures["ratio"] == pytest.approx(figures["ctxlm_ds"] / figures["copy"], rel=0.02, abs=0.01)
    assert list(tmp_path.iterdir()) == []


def test_saves(bert_route: Prepared, tmp_path: Path) -> None:
    data = [f"tokenizer.path={bert_route.tokenizer}", f"data.train=[{bert_route.train}]", "data.seq_length=32"]
    words = ("--config", "bert-tiny", "--output-dir", tmp_path, "--rounds", 1, "--steps", 1)
    sizes = (*TINY, "training.global_batch_size=2")
    lines = tool("benchmark", "save", *words, "--set", *data, *sizes).stdout.splitlines()
    figures = {line[:18].strip(): float(line[18:].split()[0]) for line in lines}
    names = ["training waits", "in the background", "the first", "complete after", "step", "step during a save"]
    assert list(figures) == ["checkpoint", *names]
    assert min(figures.values()) > 0 and figures["complete after"] > figures["in the background"]
    assert list(tmp_path.iterdir()) == []
