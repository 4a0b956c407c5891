"""A small real route shared by the integration tests: text, tokenizers, datasets, a tiny recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.data.preprocess.job import PreprocessConfig, preprocess
from ctxlm_ds.data.sources.types import InputShard
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.integration.route import tool, write_recipe
from tests.text import write_corpus

SHARDS = 3


@dataclass(frozen=True)
class Prepared:
    """Paths of a prepared route."""

    folder: Path
    tokenizer: Path
    train: Path
    heldout: Path

    def recipe(self, path: Path, **sections: dict[str, Any]) -> Path:
        """A tiny recipe over this data; `sections` add to or replace its settings."""
        settings: dict[str, Any] = {
            "name": "tiny",
            "model": {
                "hidden_size": 32, "num_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
                "max_position_embeddings": 64,
            },
            "tokenizer": {"path": str(self.tokenizer)},
            "data": {
                "train": [str(self.train)], "validation": [{"name": "heldout", "path": str(self.heldout)}],
                "seq_length": 32, "num_workers": 1,
            },
            "optimizer": {"learning_rate": 0.001},
            "schedule": {"warmup_steps": 5},
            "training": {"global_batch_size": 8, "micro_batch_size": 2, "max_steps": 12, "precision": "fp32"},
            "evaluation": {"interval_steps": 6, "max_rows": 16},
            "checkpoint": {"interval_steps": 4},
            "logging": {"interval_steps": 1, "tensorboard": False},
        }  # fmt: skip
        for name, section in sections.items():
            settings[name] = {**settings.get(name, {}), **section}
        return write_recipe(path, settings)


def prepare(folder: Path, kind: str) -> Prepared:
    """Text -> tokenizer -> datasets with the tools, as a user would."""
    for name, count, seed in (("train", 60, 1), ("heldout", 15, 2)):
        write_corpus(folder / f"{name}.jsonl", num_documents=count, seed=seed)
    tokenizer = folder / "tokenizer"
    tool("train_tokenizer.py", "--input", folder / "train.jsonl", "--type", kind, "--vocab-size", 400,
         "--output-dir", tokenizer)  # fmt: skip
    for name in ("train", "heldout"):
        tool("preprocess_data.py", "--input", folder / f"{name}.jsonl", "--json-keys", "text", "--tokenizer", tokenizer,
             "--output-prefix", folder / name, "--split-sentences")  # fmt: skip
    return Prepared(folder, tokenizer, folder / "train_text_sentence", folder / "heldout_text_sentence")


@pytest.fixture(scope="session")
def bert_route(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("bert"), "wordpiece")


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in three files, two tokenizers, the dataset of the whole and those of three shards."""
    folder = tmp_path_factory.mktemp("corpus")
    documents: list[str] = []
    for number in range(3):
        documents += write_corpus(folder / f"{number}.jsonl", 20 + 30 * number, seed=number)
    train_tokenizer("wordpiece", documents, 600, folder / "tok")
    train_tokenizer("bpe", documents, 600, folder / "other")
    inputs = [str(folder / "*.jsonl")]
    for shard in [InputShard(0, 1), *(InputShard(number, SHARDS) for number in range(SHARDS))]:
        config = PreprocessConfig(split_sentences=True, append_eod=True, shard=shard)
        preprocess(inputs, folder / "tok", folder / ("whole" if shard.count == 1 else "c"), config)
    return folder
