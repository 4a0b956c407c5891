"""tools/benchmark.py measures what it says: both sides do work, and the table has their ratio."""

from __future__ import annotations

import pytest

from tests.integration.conftest import Prepared
from tests.integration.route import tool

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


def test_a_vocabulary_is_needed() -> None:
    done = tool("benchmark.py", "pretrain", "--config", "bert-tiny", "--set", "model.vocab_size=null", check=False)
    assert done.returncode == 2 and "model.vocab_size" in done.stderr
