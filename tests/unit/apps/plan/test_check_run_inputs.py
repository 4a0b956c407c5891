"""What is missing, damaged or does not fit, before a run starts or its job is queued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.plan.check_run import input_lines
from ctxlm_ds.data.stream.run_datasets import build_run_rows
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.sample_data import random_documents, run_config, write_dataset
from tests.unit.apps.run_inputs import config_of


def problems(
    folder: Path, tokenizer: str | None = "tokenizer", train: tuple[str, ...] = ("heldout",), **settings: Any
) -> str:
    config = run_config(
        tokenizer={"path": None if tokenizer is None else str(folder / tokenizer)},
        data={"train": [str(folder / name) for name in train], "seq_length": 32},
    )
    with pytest.raises(ConfigError, match="the run would end at its beginning\n") as caught:
        input_lines(config.model_copy(update=settings), must_exist=True)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"tokenizer": "none"}, "no such tokenizer folder"),
        ({"tokenizer": None}, "tokenizer.path is not set"),
        ({"train": ()}, "data.train is empty"),
        ({"train": ("heldout", "gone")}, "gone.idx"),
        ({"tokenizer": "other"}, "made with another tokenizer"),
        ({"initialize_from": "runs/none"}, "initialize_from: runs/none is not a folder"),
    ],
)
def test_each_problem_is_named(route: Path, changed: dict[str, Any], told: str) -> None:
    assert told in problems(route, **changed)


def test_all_problems_are_named_together(route: Path) -> None:
    assert len(problems(route, train=("gone", "lost"), initialize_from="no").splitlines()) == 4


def test_a_check_names_what_is_not_here_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tok").mkdir()
    (tmp_path / "a.idx").touch()
    changes = ["tokenizer.path=tok", "data.train=[a, data/b]", "data.validation=[{name: c, path: c}]"]
    for given, named in (
        ([*changes, "initialize_from=w"], "data.train data/b.idx, data.validation c.idx, initialize_from w"),
        (changes[:1], "data.train (not set)"),
        ([], "tokenizer.path (not set), data.train (not set)"),
    ):
        missing, not_checked = input_lines(load_config("bert-base", given))
        assert missing == f"  not found from {tmp_path}: {named}"
        assert not_checked == "  tokenizer and data: not checked, for they are not all here"


SPLIT = ("data.validation=[]", "data.split_seed=1")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["tokenizer.path={folder}/other", "model.vocab_size=null"], "a/text: made with another tokenizer"),
        ([*SPLIT, "data.split='70,30'"], "holds out 8 of 20 documents for valid, fewer than 20"),
        (["data.sample_format=blocks", "objective.name=causal_lm", "model.family=gpt2"], "again with --append-eod"),
    ],
)
def test_a_check_refuses_data_that_the_run_would_refuse(route: Path, changes: list[str], told: str) -> None:
    config = config_of(route, *(change.format(folder=route) for change in changes))
    with pytest.raises(ConfigError, match="the run would end at its beginning\n") as caught:
        input_lines(config)
    assert told in str(caught.value)


def test_a_check_counts_the_documents_of_the_run_and_writes_no_copy(route: Path, tmp_path: Path) -> None:
    changes = [f"data.sample_index_dir={tmp_path}", f"initialize_from={tmp_path}/later"]
    missing, found = input_lines(config_of(route, *changes))
    assert missing.endswith(f": initialize_from {tmp_path}/later")
    assert found == "  tokenizer and data: found, 40 documents to train on, 20 held out"
    tokenizer = load_tokenizer(route / "tokenizer")
    metadata = {"tokenizer_fingerprint": tokenizer.fingerprint}
    write_dataset(tmp_path / "long", random_documents(200, vocab_size=tokenizer.vocab_size), metadata=metadata)
    before = sorted(tmp_path.iterdir())
    config = config_of(route, f"data.train=[{tmp_path}/long]", *SPLIT, "data.split='80,20'")
    (found,) = input_lines(config)
    assert sorted(tmp_path.iterdir()) == before
    rows = build_run_rows(config.row_settings, tokenizer, build_objective(config.objective, tokenizer))
    counts = [index.meta["documents"] for index in (*rows.train.indexes, *rows.validation["long"].indexes)]
    assert found == f"  tokenizer and data: found, {counts[0]} documents to train on, {counts[1]} held out"
