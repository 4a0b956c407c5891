"""Tokenizers and inputs of the tests of preprocessing and of sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.data.preprocess import job as preprocess_module
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents, write_corpus

DOCUMENTS = make_documents(120, seed=7)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    train_tokenizer("wordpiece", DOCUMENTS, 500, folder / "wordpiece")
    train_tokenizer("bpe", DOCUMENTS, 500, folder / "bpe")
    train_tokenizer("bpe", DOCUMENTS, 500, folder / "bpe_prefix", add_prefix_space=True)
    return {name: folder / name for name in ("wordpiece", "bpe", "bpe_prefix")}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_tokenizer("bpe", DOCUMENTS[:60], 500, folder)
    return folder


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three files of a dozen chunks, one of them compressed; progress is saved after every chunk."""
    monkeypatch.setattr("ctxlm_ds.data.sources.reading.CHUNK_BYTES", 4000)
    monkeypatch.setattr(preprocess_module, "SAVE_INTERVAL_BYTES", 1)
    names = ["a.jsonl", "b.jsonl.gz", "c.jsonl"]
    for seed, name in enumerate(names):
        write_corpus(tmp_path / name, 25, seed=seed, format=name.split(".", 1)[1])
    with open(tmp_path / "c.jsonl", "a") as file:
        file.write('{"other": "key"}\n{broken\n')
    return [tmp_path / name for name in names]
