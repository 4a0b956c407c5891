"""Train an ELMo from raw text, and resume its lanes and states on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.route import call, launcher, metrics, pretrain_words, tool, write_recipe
from tests.text import write_corpus

STEPS, FIRST, SECOND = 6, 3, 5


@pytest.fixture(scope="module")
def route(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, a tokenizer with words that are only input, and datasets of sentences."""
    folder = tmp_path_factory.mktemp("elmo")
    for name, count, seed in (("train", 60, 1), ("heldout", 12, 2)):
        write_corpus(folder / f"{name}.jsonl", num_documents=count, seed=seed)
    tool("train_tokenizer.py", "--input", folder / "train.jsonl", "--type", "elmo", "--vocab-size", 60,
         "--input-words", 10_000, "--output-dir", folder / "tokenizer")  # fmt: skip
    for name in ("train", "heldout"):
        tool("preprocess_data.py", "--input", folder / f"{name}.jsonl", "--tokenizer", folder / "tokenizer",
             "--output-prefix", folder / name, "--split-sentences", "--workers", 1)  # fmt: skip
    return folder


def words(route: Path, run: Path, steps: int, ranks: int = 1, *overrides: str) -> list[object]:
    settings = {
        "extends": "elmo-laptop",
        "name": "tiny-elmo",
        "model": {
            "projection_size": 16, "cell_size": 24, "num_sampled": 20, "filters": [[1, 8], [3, 8]], "vocab_size": None,
        },
        "tokenizer": {"path": str(route / "tokenizer")},
        "data": {
            "train": [str(route / "train_text_sentence")],
            "validation": [{"name": "heldout", "path": str(route / "heldout_text_sentence")}], "num_workers": 1,
        },
        "training": {"global_batch_size": 8, "micro_batch_size": 2, "max_steps": steps},
        "evaluation": {"interval_steps": 2, "max_rows": 40},
        "logging": {"interval_steps": 1, "tensorboard": False},
        "run_dir": str(run),
    }  # fmt: skip
    recipe = write_recipe(run.parent / f"{run.name}.json", settings)
    return [*launcher("forked", ranks), *pretrain_words(recipe, overrides)]


def test_a_resume_on_another_number_of_ranks_goes_on_with_the_lanes(route: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    call(*words(route, whole, STEPS))
    for steps, ranks in ((FIRST, 1), (SECOND, 2), (STEPS, 1)):
        call(*words(route, parts, steps, ranks))
    for figure in ("loss", "forward", "backward", "grad_norm"):
        assert list(metrics(parts, figure).values()) == pytest.approx(list(metrics(whole, figure).values()), rel=1e-5)
    held_out = metrics(whole, "eval/heldout/forward_perplexity"), metrics(parts, "eval/heldout/forward_perplexity")
    assert set(held_out[0]) == {2, 4, STEPS} < {*held_out[1]}
    for step, perplexity in held_out[0].items():
        assert held_out[1][step] == pytest.approx(perplexity, rel=1e-5)
    refused = call(*words(route, parts, STEPS + 1, 1, "training.global_batch_size=16"), check=False)
    assert refused.returncode and "training.global_batch_size: 8 -> 16" in refused.stderr
