"""Words of rows, and the steps of a budget in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.stream.run_datasets import train_parts
from ctxlm_ds.data.stream.run_plan import with_word_budget, words_per_row
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.words import STEPS_FOLLOW
from tests.sample_data import random_documents, write_dataset
from tests.unit.data.stream.test_run_datasets import TOKENIZER, recipe

WORDS = {"one": 7_000, "two": 3_000}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, (name, words) in enumerate(WORDS.items()):
        documents = random_documents(40 - 15 * seed, sentences=5, seed=seed)
        write_dataset(tmp_path / name, documents, eod_id=3, metadata={"words": words})
    return tmp_path


def rows_of(config: RunConfig) -> RowSource:
    return build_rows(train_parts(config.data), TOKENIZER, config.row_settings)


def budget(config: RunConfig, words: int | None, **training: Any) -> RunConfig:
    return config.with_values("training", max_words=words, **{"max_steps": STEPS_FOLLOW, **training})


def test_an_epoch_reads_every_word_once(folder: Path) -> None:
    config = recipe(folder, split=None)
    rows = rows_of(config)
    assert words_per_row(config.data, config.training, rows) * len(rows) == pytest.approx(10_000)
    weights = [{"path": str(folder / "one"), "weight": 1}, {"path": str(folder / "two"), "weight": 3}]
    mixed = recipe(folder, split=None, blend="weighted", train=weights)
    one, two = (WORDS[name] / len(index) for name, index in zip(WORDS, rows.indexes, strict=True))
    assert words_per_row(mixed.data, mixed.training, rows) == pytest.approx(0.25 * one + 0.75 * two)


def test_a_part_has_the_words_of_its_share_of_the_tokens(folder: Path) -> None:
    config = recipe(folder, split="50,50,0", train=[str(folder / "one")])
    rows = rows_of(config)
    dataset = rows.indexes[0].dataset
    first, after = rows.indexes[0].meta["dataset"]["documents"]
    share = dataset.document_tokens(first, after).sum() / dataset.num_tokens
    assert words_per_row(config.data, config.training, rows) * len(rows) == pytest.approx(7_000 * share)


def test_the_steps_are_the_fewest_that_read_the_budget(folder: Path) -> None:
    config = recipe(folder, split=None)
    rows, batch = rows_of(config), config.training.global_batch_size
    found, per_row = with_word_budget(budget(config, 25_000), rows)
    steps = found.training.max_steps
    assert steps * batch * per_row >= 25_000 > (steps - 1) * batch * per_row
    ramp = (2, 2, 64)
    grown, _ = with_word_budget(budget(config, 25_000, batch_ramp=ramp), rows)
    read = [grown.training.rows_after(grown.training.max_steps - back) * per_row for back in (0, 1)]
    assert read[0] >= 25_000 > read[1] and grown.training.max_steps > steps
    later, _ = with_word_budget(budget(config, 25_000, batch_ramp=ramp), rows, first_row=65)  # the ramp is over
    assert later.training.max_steps == steps
    again, _ = with_word_budget(found, rows)  # the run's own config.yaml
    assert again == found
    with pytest.raises(ConfigError, match=f"training.max_steps: 9, but training.max_words 25,000 gives {steps} steps"):
        with_word_budget(budget(config, 25_000, max_steps=9), rows)


@pytest.mark.parametrize(("words", "fits"), [(100_000, True), (104_000, False)])
def test_more_epochs_than_allowed_are_refused(folder: Path, words: int, fits: bool) -> None:
    config = budget(recipe(folder, split=None, max_epochs=10), words)
    rows = rows_of(config)
    if fits:
        assert with_word_budget(config, rows)[0].training.max_steps > 0
    else:
        with pytest.raises(ConfigError, match=r"data.max_epochs: 10, but the run would read one 10\.\d+ times"):
            with_word_budget(config, rows)


def test_a_dataset_without_a_count_is_refused_only_where_it_is_needed(folder: Path) -> None:
    write_dataset(folder / "old", random_documents(10, sentences=5, seed=9), eod_id=3)
    config = recipe(folder, split=None, train=[str(folder / "one"), str(folder / "old")])
    rows = rows_of(config)
    assert with_word_budget(config, rows) == (config, 0.0)
    with pytest.raises(DataError, match="old: its JSON has no count of words, which training.max_words needs"):
        with_word_budget(budget(config, 100), rows)
    with pytest.raises(DataError, match="checkpoint.at_words needs"):
        with_word_budget(config.with_values("checkpoint", at_words=[100]), rows)
