"""ctxlm_ds.apps.cluster.inputs: what is missing, damaged or does not fit, before a job is queued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.cluster.inputs import input_problems
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.sample_data import random_documents, run_config, write_dataset
from tests.text import make_documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tokenizers and a dataset of the first."""
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = train_tokenizer("wordpiece", make_documents(60, seed=1), 300, folder / "tok")
    train_tokenizer("wordpiece", make_documents(60, seed=2), 200, folder / "other")
    metadata = {"tokenizer_fingerprint": tokenizer.fingerprint}
    write_dataset(folder / "text", random_documents(20, vocab_size=tokenizer.vocab_size), metadata=metadata)
    return folder


def problems(folder: Path, tokenizer: str | None = "tok", train: tuple[str, ...] = ("text",), **settings: Any) -> str:
    config = run_config(
        tokenizer={"path": None if tokenizer is None else str(folder / tokenizer)},
        data={"train": [str(folder / name) for name in train], "seq_length": 32},
    )
    return "\n".join(input_problems(config.model_copy(update=settings)))


def test_a_complete_run_has_none(folder: Path) -> None:
    assert problems(folder) == ""


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"tokenizer": "none"}, "no such tokenizer folder"),
        ({"tokenizer": None}, "tokenizer.path and data.train are needed"),
        ({"train": ()}, "tokenizer.path and data.train are needed"),
        ({"train": ("text", "gone")}, "gone.idx"),
        ({"tokenizer": "other"}, "made with another tokenizer"),
        ({"initialize_from": "runs/none"}, "initialize_from: runs/none is not a folder"),
    ],
)
def test_each_problem_is_named(folder: Path, changed: dict[str, Any], told: str) -> None:
    assert told in problems(folder, **changed)


def test_all_problems_are_named_together(folder: Path) -> None:
    assert len(problems(folder, train=("gone", "lost"), initialize_from="no").splitlines()) >= 3
