"""A recipe with tokenizers and datasets, for what looks at the inputs of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.sample_data import random_documents, write_dataset
from tests.text import make_documents
from tests.unit.apps.run_inputs import config_of, rows_of


@pytest.fixture(scope="module")
def route(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tokenizers, two datasets of one name in two folders, a held-out one, and a recipe; indexes built."""
    folder = tmp_path_factory.mktemp("route")
    tokenizer = train_tokenizer("wordpiece", make_documents(60, seed=1), 300, folder / "tokenizer")
    train_tokenizer("wordpiece", make_documents(60, seed=2), 200, folder / "other")
    made_with = {"tokenizer_fingerprint": tokenizer.fingerprint}
    for seed, name in enumerate(("a/text", "b/text", "heldout")):
        (folder / name).parent.mkdir(exist_ok=True)
        write_dataset(
            folder / name, random_documents(20, seed=seed, vocab_size=tokenizer.vocab_size), metadata=made_with
        )
    recipe = {
        "tokenizer": {"path": str(folder / "tokenizer")},
        "data": {
            "train": [{"path": str(folder / "a/text"), "epochs": 2}, str(folder / "b/text")],
            "validation": [{"name": "held", "path": str(folder / "heldout")}], "seq_length": 32,
        },
    }  # fmt: skip
    (folder / "recipe.json").write_text(json.dumps(recipe))
    rows_of(config_of(folder), tokenizer)
    return folder
