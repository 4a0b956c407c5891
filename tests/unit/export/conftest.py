"""Tokenizers shared by the export tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_tokenizer


@pytest.fixture(scope="session")
def wordpiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer("wordpiece", tmp_path_factory.mktemp("tokenizers") / "wordpiece")


@pytest.fixture(scope="session")
def byte_bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer("byte_bpe", tmp_path_factory.mktemp("tokenizers") / "byte_bpe")
