"""Exports of tiny models of every family with random weights, each made once."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ctxlm_ds.export.huggingface import to_hf
from ctxlm_ds.recipe.schema import RunConfig, TokenizerConfig
from ctxlm_ds.registry import FAMILIES
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.checkpoints import WORDS, random_weights, write_run
from tests.sections import data_section, model_section, objective_section

Export = Callable[[str], Path]


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    root = tmp_path_factory.mktemp("exports")

    @cache
    def tokenizer(kind: str) -> Path:
        rng = random.Random(7)
        texts = (" ".join(rng.choices(WORDS, k=9)) + "." for _ in range(200))
        train_tokenizer(kind, texts, 300, root / "tokenizers" / kind)
        return root / "tokenizers" / kind

    @cache
    def make(family: str) -> Path:
        entry = FAMILIES.get(family)
        tiny, path = entry.tiny(), tokenizer(entry.tokenizer)
        config = RunConfig(
            name=family, tokenizer=TokenizerConfig(path=str(path)), objective=objective_section(**tiny["objective"]),
            model=model_section(**tiny["model"], vocab_size=load_tokenizer(path).vocab_size),
            data=data_section(**{"seq_length": 32} | tiny.get("data", {})),
        )  # fmt: skip
        to_hf(write_run(root / "runs" / family, config, random_weights(config)), root / family)
        return root / family

    return make
