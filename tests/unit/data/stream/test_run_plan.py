"""The table of what a run reads: a row for each source, before the first step and after a resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.stream.run_datasets import train_parts
from ctxlm_ds.data.stream.run_plan import plan_lines, summary_lines
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
