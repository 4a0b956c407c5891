"""tools/build_samples.py and the objective of tools/inspect_dataset.py as a user types them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.data.index.build import FEWEST_DOCUMENTS
from ctxlm_ds.data.preprocess.job import PreprocessConfig, preprocess
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.integration.route import tool, write_recipe
from tests.text import write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, and a text as sentences and as documents, more than an excerpt has."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = write_corpus(folder / "text.jsonl", FEWEST_DOCUMENTS + 20, seed=5)
    train_tokenizer("wordpiece", texts, 600, folder / "tokenizer")
    for name, splits in (("sentences", True), ("documents", False)):
        config = PreprocessConfig(split_sentences=splits)
        preprocess([str(folder / "text.jsonl")], folder / "tokenizer", folder / name, config)
    return folder


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> Path:
    train = str(corpus / "sentences_text_sentence")
    return write_recipe(
        tmp_path / "r.yaml",
        {
            "tokenizer": {"path": str(corpus / "tokenizer")},
            "model": {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64},
            "data": {"train": [train], "validation": [{"name": "again", "path": train}], "seq_length": 64},
        },
    )


def test_build_samples_command(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "indexes"
    done = tool("build_samples.py", "--config", recipe, "--set", f"data.sample_index_dir={folder}", "--show", 2)
    for word in ("segment_pair", "B follows A", "again (held out)", "padding", "[CLS]", "→", "row "):
        assert word in done.stdout, done.stdout
    assert len(list(folder.iterdir())) == 2
    again = tool("build_samples.py", "--config", recipe, "--set", f"data.sample_index_dir={folder}")
    assert "building the sample index" not in again.stderr
    for option in ("data.packing=true", "objective.masking=static"):
        tool("build_samples.py", "--config", recipe, "--set", f"data.sample_index_dir={folder}", option)
    assert len(list(folder.iterdir())) == 5


def test_build_samples_refuses_what_cannot_be(corpus: Path, recipe: Path) -> None:
    documents = f"data.train=[{corpus / 'documents_text_document'}]"
    wrong = tool("build_samples.py", "--config", recipe, "--set", documents, check=False)
    assert wrong.returncode == 2 and "--split-sentences" in wrong.stderr and "Traceback" not in wrong.stderr
    assert not list(corpus.glob("documents*.samples-*"))
    for words in (("--workers", -1), ("--workers", 0), ("--show", -3)):
        wrong = tool("build_samples.py", "--config", recipe, *words, check=False)
        assert wrong.returncode == 2 and f"{words[0]}: {words[1]} is too small" in wrong.stderr


def test_inspect_dataset_shows_the_objective(corpus: Path, recipe: Path, tmp_path: Path) -> None:
    folder, sentences = tmp_path / "indexes", corpus / "sentences_text_sentence"
    words = ("--objective", "--config", recipe, "--set", f"data.sample_index_dir={folder}", "data.packing=true")
    done = tool("inspect_dataset.py", sentences, *words, "--show", 3)
    assert done.stdout.count("positions, ") == 3
    assert "[MASK→" in done.stdout and "\x1b[" not in done.stdout
    assert "rows of only the first" in done.stdout and not folder.exists()
    missing = tool("inspect_dataset.py", sentences, "--objective", check=False)
    assert missing.returncode == 2 and "--config" in missing.stderr
