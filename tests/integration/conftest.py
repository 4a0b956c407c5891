"""A small real route shared by the integration tests: text, tokenizers, datasets, a tiny recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.route import call, launcher, tool, write_recipe
from tests.text import write_corpus


@dataclass(frozen=True)
class Prepared:
    """Paths of a prepared route."""

    folder: Path
    tokenizer: Path
    train: Path
    heldout: Path

    def link(self, folder: Path, **datasets: Path) -> Path:
        """Give a folder the tokenizer tok and datasets data/NAME_text_sentence, as pages of docs/ name them."""
        (folder / "tok").symlink_to(self.tokenizer)
        (folder / "data").mkdir()
        for name, prefix in datasets.items():
            for end in ("bin", "idx", "json"):
                (folder / "data" / f"{name}_text_sentence.{end}").symlink_to(f"{prefix}.{end}")
        return folder

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

    def warm_up(self) -> Prepared:
        """Compile the loops of a fresh checkout in one process: every rank of a first run would, for half a minute."""
        recipe = self.recipe(self.folder / "warm-up.yaml", training={"max_steps": 6})
        call(*launcher("forked", 1), "--config", recipe, "--set", f"run_dir={self.folder / 'warm-up'}")
        return self


def prepare(folder: Path, kind: str, vocab_size: int = 400, form: str = "--split-sentences") -> Prepared:
    """Text -> tokenizer -> datasets with the tools, as a user would."""
    for name, count, seed in (("train", 60, 1), ("heldout", 15, 2)):
        write_corpus(folder / f"{name}.jsonl", num_documents=count, seed=seed)
    tokenizer = folder / "tokenizer"
    tool("train_tokenizer.py", "--input", folder / "train.jsonl", "--type", kind, "--vocab-size", vocab_size,
         "--output-dir", tokenizer)  # fmt: skip
    for name in ("train", "heldout"):
        tool("preprocess_data.py", "--input", folder / f"{name}.jsonl", "--json-keys", "text", "--tokenizer", tokenizer,
             "--output-prefix", folder / name, form)  # fmt: skip
    unit = "sentence" if form == "--split-sentences" else "document"
    return Prepared(folder, tokenizer, folder / f"train_text_{unit}", folder / f"heldout_text_{unit}")


@pytest.fixture(scope="session")
def bert_route(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("bert"), "wordpiece").warm_up()
