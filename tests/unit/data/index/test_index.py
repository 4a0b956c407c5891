"""The sample index on disk: datasets as Megatron writes them, packed rows, several datasets as one space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.data.formats.base import SequenceTemplate
from ctxlm_ds.data.index.build import IndexPlace, build_rows
from ctxlm_ds.data.index.index import RowSource, SampleIndex
from ctxlm_ds.data.sample import Samples
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.schema import RunConfig
from tests.ragged import one_sample
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


def damaged_indexes(
    index: SampleIndex, tokenizer: Any, number: int, fields: Sequence[str], values: Sequence[int]
) -> Iterator[SampleIndex]:
    """Yield the index as it is once one field of a record has another value, for each field and value."""
    path = index.directory / "samples.npy"
    whole, template = path.read_bytes(), SequenceTemplate.of(tokenizer)
    for field, value in product(fields, values):
        if abs(value) <= np.iinfo(index.records.dtype[field]).max and index.records[field][number] != value:
            records = np.lib.format.open_memmap(path, mode="r+")
            records[field][number] = value
            del records
            yield SampleIndex(index.directory, index.dataset, template, index.meta["key"], index.language_id)
            path.write_bytes(whole)


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


@pytest.mark.parametrize(("sample_format", "seq_length"), [("blocks", 1 << 17), ("bidirectional_lanes", 1 << 16)])
def test_the_longest_rows_are_read(tmp_path: Path, sample_format: str, seq_length: int) -> None:
    document = [np.random.default_rng(0).integers(5, 1000, 300_000).tolist()]
    prefix = write_dataset(tmp_path / "d", [document], eod_id=SEP if sample_format == "blocks" else None)
    index = build_sample_index(prefix, BERT, config_of(sample_format, seq_length))
    assert max(map(len, ids_of(index))) >= seq_length


def test_rows_of_several_datasets_are_one_space(tmp_path: Path) -> None:
    prefixes = [write_dataset(tmp_path / name, random_documents(10, seed=seed)) for seed, name in enumerate("abc")]
    config = config_of("full_sentences")
    rows = build_rows(prefixes, BERT, config.row_settings)
    assert len(rows) == sum(len(index) for index in rows.indexes)
    located = [locate(rows, row) for row in range(len(rows))]
    expected = [(index, number) for index in rows.indexes for number in range(len(index))]
    assert located == expected
    assert len({index.random_key for index in rows.indexes}) == 3


TOKENIZER = FakeTokenizer()
FORMATS = ("segment_pair", "sentence_pair", "full_sentences", "doc_sentences", "blocks")


def config_of_rows(sample_format: str, **data: Any) -> RunConfig:
    is_block = sample_format == "blocks"
    return run_config(
        data={"sample_format": sample_format} | data,
        objective={"name": "causal_lm" if is_block else "masked_lm"},
        model={"family": "gpt2"} if is_block else {},
    )


def sources(folder: Path, config: RunConfig) -> RowSource:
    """Three datasets of different sizes, all ending their documents with a separator."""
    prefixes = [folder / name for name in "abc"]
    for number, prefix in enumerate(prefixes):
        write_dataset(prefix, random_documents(5 + 10 * number, seed=number), eod_id=TOKENIZER.sep_id)
    return build_rows(prefixes, TOKENIZER, config.row_settings)


def assert_same(samples: Samples, number: int, index: SampleIndex, sample_number: int) -> None:
    ours, alone = one_sample(samples, number), sample_of(index, sample_number)
    for name in ("input_ids", "token_type_ids", "special_mask"):
        assert np.array_equal(getattr(ours, name), getattr(alone, name)), name
    assert ours.sequence_label == alone.sequence_label


@pytest.mark.parametrize("sample_format", FORMATS)
@pytest.mark.parametrize("packing", [False, True])
def test_rows_of_several_sources_are_each_sample_alone(tmp_path: Path, sample_format: str, packing: bool) -> None:
    config = config_of_rows(sample_format, **({} if sample_format == "blocks" else {"packing": packing}))
    rows = sources(tmp_path, config)
    wanted = np.random.default_rng(0).permutation(len(rows))[:40]
    wanted[[3, 17]] = -1
    epochs = np.arange(len(wanted))
    samples, row_starts = rows.samples(wanted, epochs)
    assert len(row_starts) == len(wanted) + 1 and row_starts[-1] == len(samples.starts) - 1
    used = set()
    for place, row in enumerate(wanted.tolist()):
        first, after = int(row_starts[place]), int(row_starts[place + 1])
        if row == -1:
            assert first == after
            continue
        index, local = locate(rows, row)
        used.add(index.random_key)
        numbers = samples_of_row(index, local)
        assert len(numbers) == after - first >= 1
        for slot, number in zip(range(first, after), numbers, strict=True):
            assert_same(samples, slot, index, number)
            assert samples.keys[slot].tolist() == [number, place, index.random_key]
    assert len(used) == 3


def test_damaged_rows_are_named(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(20))
    config = run_config(data={"packing": True})
    index = build_sample_index(prefix, TOKENIZER, config)
    for name, value, message in (
        ("row_starts", 10**9, "row_starts"),
        ("row_starts", -5, "row_starts"),
        ("row_samples", 10**9, "sample 1000000000 "),
        ("row_samples", -1, "sample -1 "),
    ):
        path = index.directory / f"{name}.npy"
        whole = path.read_bytes()
        values = np.lib.format.open_memmap(path, mode="r+")
        values[2:] = value
        del values
        opened = IndexPlace.of(prefix, TOKENIZER, config.row_settings).open(TOKENIZER)
        with pytest.raises(DataError, match=message):
            RowSource([opened]).samples(np.array([1, 2]), np.zeros(2, dtype=np.int64))
        path.write_bytes(whole)
