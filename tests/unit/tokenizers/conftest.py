"""Tokenizers that several tests look at, trained once a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents

TEXTS = make_documents(150, seed=3)
SETTINGS = {
    "uncased": ("wordpiece", {"lowercase": True}),
    "cased": ("wordpiece", {"lowercase": False}),
    "bpe": ("bpe", {"add_prefix_space": False}),
    "bpe_prefix": ("bpe", {"add_prefix_space": True}),
}


@pytest.fixture(scope="session", params=list(SETTINGS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Tokenizer]:
    kind, settings = SETTINGS[request.param]
    folder = tmp_path_factory.mktemp("tokenizer") / request.param
    return request.param, folder, train_tokenizer(kind, TEXTS, 600, folder, **settings)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizer") / "gpt2"
    return folder, train_tokenizer("gpt2", TEXTS, 600, folder)
