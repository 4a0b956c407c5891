"""The table of what a run reads, before the first step and after a resume, and the steps of a budget in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.stream.run_datasets import train_parts
from ctxlm_ds.data.stream.run_plan import plan_lines, summary_lines, with_word_budget, words_per_row
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.words import STEPS_FOLLOW
from tests.sample_data import build_sample_index, random_documents, write_dataset
from tests.unit.data.index.test_index import BERT, config_of
from tests.unit.data.stream.test_run_datasets import TOKENIZER, documents_of, held_out_rows, recipe


def test_a_summary_has_a_row_for_each_index_and_fits_a_terminal(tmp_path: Path) -> None:
    indexes = {
        f"source-{number} (held out)": build_sample_index(
            write_dataset(tmp_path / f"d{number}", random_documents(5, seed=number)), BERT, config_of("segment_pair")
        )
        for number in range(4)
    }
    lines = list(summary_lines(indexes))
    table, folders = lines[:6], lines[6:]
    assert max(map(len, table)) <= 100
    for name, index, row in zip(indexes, indexes.values(), table[1:5], strict=True):
        assert row.strip().startswith(name) and f" {len(index.records)} (1 pass) " in row
        middle = np.sort(index.records["num_tokens"])[(len(index.records) + 1) // 2 - 1]
        assert row.split()[-2] == str(middle)
        assert any(str(index.directory) in line for line in folders)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "one", random_documents(40, sentences=5, seed=1), eod_id=3)
    write_dataset(tmp_path / "two", random_documents(25, sentences=5, seed=2), eod_id=3)
    return tmp_path


def test_the_plan_says_what_the_run_will_read(folder: Path) -> None:
    config = recipe(folder, blend="weighted")
    weights = [{"path": str(folder / "one"), "weight": 1, "name": "first"}, {"path": str(folder / "two"), "weight": 3}]
    data = config.data.model_validate(config.data.model_dump() | {"train": weights})
    training = config.training.model_copy(update={"max_steps": 100, "max_tokens": 123456})
    config = config.model_copy(update={"data": data, "training": training})
    train, held_out = build_rows(train_parts(config.data), TOKENIZER, config.row_settings), held_out_rows(config)
    lines = plan_lines(config.data, config.training, config.evaluation, train, held_out)
    assert "100 steps of 8 rows of 64 positions: 800 rows (unless max_tokens 123,456 ends it before)" in lines[0]
    assert "sources by weight, split 80,12,8" in lines[0]
    cells = {line.split()[0]: line.split()[1:] for line in lines[2:5]}
    for name, index, share in (("first", train.indexes[0], 0.25), ("two", train.indexes[1], 0.75)):
        epochs = share * 800 / len(index)
        tokens = index.meta["tokens"]
        assert cells[name] == [
            str(len(documents_of(train)["one" if name == "first" else "two"])), f"{tokens:,}", f"{len(index):,}",
            f"{share:.2%}", f"{epochs:.2f}", f"{round(epochs * tokens):,}",
        ]  # fmt: skip
    assert cells["together"][0] == "52" and cells["together"][3] == "100.00%"
    assert [line.split()[0] for line in lines[-2:]] == ["first", "two"]
    assert lines[-2].split()[1] == "5"


def test_the_plan_after_a_resume_counts_what_was_read(folder: Path) -> None:
    """30 steps of 16 rows, then 70 of 8."""
    config = recipe(folder)
    config = config.model_copy(update={"training": config.training.model_copy(update={"max_steps": 100})})
    train = build_rows(train_parts(config.data), TOKENIZER, config.row_settings)
    head, _, *table = plan_lines(
        config.data, config.training, config.evaluation, train, {}, steps_done=30, rows_read=480
    )
    assert "has read 480 rows in 30 steps and reads 70 more steps of 8 rows" in head and "1,040 rows in all" in head
    assert table[-1].split()[-2] == f"{1040 / len(train):.2f}"
    assert (
        "has read 480 rows in 200 steps and reads 0 more"
        in plan_lines(config.data, config.training, config.evaluation, train, {}, 200, 480)[0]
    )


WORDS = {"one": 7_000, "two": 3_000}


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    for seed, (name, words) in enumerate(WORDS.items()):
        documents = random_documents(40 - 15 * seed, sentences=5, seed=seed)
        write_dataset(tmp_path / name, documents, eod_id=3, metadata={"words": words})
    return tmp_path


def rows_of(config: RunConfig) -> RowSource:
    return build_rows(train_parts(config.data), TOKENIZER, config.row_settings)


def budget(config: RunConfig, words: int | None, **training: Any) -> RunConfig:
    return config.with_values("training", max_words=words, **{"max_steps": STEPS_FOLLOW, **training})


def test_an_epoch_reads_every_word_once(counted: Path) -> None:
    config = recipe(counted, split=None)
    rows = rows_of(config)
    assert words_per_row(config.data, config.training, rows) * len(rows) == pytest.approx(10_000)
    weights = [{"path": str(counted / "one"), "weight": 1}, {"path": str(counted / "two"), "weight": 3}]
    mixed = recipe(counted, split=None, blend="weighted", train=weights)
    one, two = (WORDS[name] / len(index) for name, index in zip(WORDS, rows.indexes, strict=True))
    assert words_per_row(mixed.data, mixed.training, rows) == pytest.approx(0.25 * one + 0.75 * two)


def test_a_part_has_the_words_of_its_share_of_the_tokens(counted: Path) -> None:
    config = recipe(counted, split="50,50,0", train=[str(counted / "one")])
    rows = rows_of(config)
    dataset = rows.indexes[0].dataset
    first, after = rows.indexes[0].meta["dataset"]["documents"]
    share = dataset.document_tokens(first, after).sum() / dataset.num_tokens
    assert words_per_row(config.data, config.training, rows) * len(rows) == pytest.approx(7_000 * share)


def test_the_steps_are_the_fewest_that_read_the_budget(counted: Path) -> None:
    config = recipe(counted, split=None)
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
def test_more_epochs_than_allowed_are_refused(counted: Path, words: int, fits: bool) -> None:
    config = budget(recipe(counted, split=None, max_epochs=10), words)
    rows = rows_of(config)
    if fits:
        assert with_word_budget(config, rows)[0].training.max_steps > 0
    else:
        with pytest.raises(ConfigError, match=r"data.max_epochs: 10, but the run would read one 10\.\d+ times"):
            with_word_budget(config, rows)


def test_a_dataset_without_a_count_is_refused_only_where_it_is_needed(counted: Path) -> None:
    write_dataset(counted / "old", random_documents(10, sentences=5, seed=9), eod_id=3)
    config = recipe(counted, split=None, train=[str(counted / "one"), str(counted / "old")])
    rows = rows_of(config)
    assert with_word_budget(config, rows) == (config, 0.0)
    with pytest.raises(DataError, match="old: its JSON has no count of words, which training.max_words needs"):
        with_word_budget(budget(config, 100), rows)
    with pytest.raises(DataError, match="checkpoint.at_words needs"):
        with_word_budget(config.with_values("checkpoint", at_words=[100]), rows)
