"""The sample index on disk: datasets as Megatron writes them, packed rows, several datasets as one space."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.index.index import SampleIndex
from ctxlm_ds.recipe.schema import RunConfig
from tests.sample_data import (
    FakeTokenizer,
    build_sample_index,
    locate,
    random_documents,
    run_config,
    sample_of,
    samples_of_row,
    write_dataset,
)

BERT = FakeTokenizer()
CLS, SEP = BERT.cls_id, BERT.sep_id


def config_of(sample_format: str, seq_length: int = 64, **data: object) -> RunConfig:
    return run_config(data={"sample_format": sample_format, "seq_length": seq_length} | data)


def ids_of(index: SampleIndex) -> list[list[int]]:
    return [sample_of(index, number).input_ids.tolist() for number in range(len(index.records))]


def forget_record(prefix: Path) -> None:
    """Leave a dataset as Megatron writes it."""
    for extension in (".json", ".sha256"):
        prefix.with_suffix(extension).unlink(missing_ok=True)


@pytest.mark.parametrize("eod_id", [SEP, None])
def test_a_dataset_without_our_record_is_read_by_what_it_holds(tmp_path: Path, eod_id: int | None) -> None:
    """As Megatron writes it: no JSON; its documents end with the separator or they do not."""
    documents = random_documents(100, sentences=5, seed=1)
    config = config_of("full_sentences", 32)
    recorded = build_sample_index(write_dataset(tmp_path / "recorded", documents), BERT, config)
    bare = write_dataset(tmp_path / "bare", documents, eod_id=eod_id)
    forget_record(bare)
    assert ids_of(build_sample_index(bare, BERT, config)) == ids_of(recorded)
    assert len(build_sample_index(bare, BERT, config_of("segment_pair")).records) > 100


def test_packed_rows(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(100, sentences=3, tokens=8))
    config = config_of("sentence_pair", 64, packing=True, max_sequences_per_row=4)
    index = build_sample_index(prefix, BERT, config)
    rows = [samples_of_row(index, row) for row in range(len(index))]
    assert sorted(sum(rows, [])) == list(range(len(index.records)))
    assert len(index) < 0.7 * len(index.records)
    for row in range(len(index)):
        samples = [sample_of(index, number) for number in rows[row]]
        assert len(samples) <= 4
        assert sum(len(sample.input_ids) for sample in samples) <= 64


def test_rows_of_several_datasets_are_one_space(tmp_path: Path) -> None:
    prefixes = [write_dataset(tmp_path / name, random_documents(10, seed=seed)) for seed, name in enumerate("abc")]
    config = config_of("full_sentences")
    rows = build_rows(prefixes, BERT, config.row_settings)
    assert len(rows) == sum(len(index) for index in rows.indexes)
    located = [locate(rows, row) for row in range(len(rows))]
    expected = [(index, number) for index in rows.indexes for number in range(len(index))]
    assert located == expected
    assert len({index.random_key for index in rows.indexes}) == 3
