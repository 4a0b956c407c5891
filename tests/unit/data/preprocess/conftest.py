"""Tokenizers of the tests of preprocessing, trained once a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents

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
