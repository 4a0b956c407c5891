"""Reading samples in bulk: each as it is on its own, and damage named before it becomes a sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.index.build import IndexPlace, build_rows
from ctxlm_ds.data.index.index import RowSource, SampleIndex, ranges
from ctxlm_ds.data.sample import Samples
from ctxlm_ds.data.stream.loader import TrainLoader
from ctxlm_ds.errors import DataError
from ctxlm_ds.objectives.build import build_objective
from ctxlm_ds.recipe.schema import RunConfig
from tests.sample_data import (
    FakeTokenizer,
    build_sample_index,
    example_of,
    locate,
    random_documents,
    run_config,
    sample_of,
    samples_of_row,
    write_dataset,
)

TOKENIZER = FakeTokenizer()
FORMATS = ("segment_pair", "sentence_pair", "full_sentences", "doc_sentences", "blocks")


def config_of(sample_format: str, **data: Any) -> RunConfig:
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
    return build_rows(prefixes, TOKENIZER, config)


def assert_same(samples: Samples, number: int, index: SampleIndex, sample_number: int) -> None:
    ours, alone = samples.sample(number), sample_of(index, sample_number)
    for name in ("input_ids", "token_type_ids", "special_mask"):
        assert np.array_equal(getattr(ours, name), getattr(alone, name)), name
    assert ours.sequence_label == alone.sequence_label


@pytest.mark.parametrize("sample_format", FORMATS)
@pytest.mark.parametrize("packing", [False, True])
def test_rows_of_several_sources_are_each_sample_alone(tmp_path: Path, sample_format: str, packing: bool) -> None:
    config = config_of(sample_format, **({} if sample_format == "blocks" else {"packing": packing}))
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


def test_static_copies_of_several_sources(tmp_path: Path) -> None:
    config = run_config(objective={"masking": "static"}, data={"packing": True})
    prefixes = [write_dataset(tmp_path / name, random_documents(9, seed=ord(name))) for name in "ab"]
    rows = build_rows(prefixes, TOKENIZER, config, build_objective(config.objective, TOKENIZER))
    wanted = np.random.default_rng(0).permutation(len(rows))
    examples, row_starts = rows.examples(wanted)
    for place, row in enumerate(wanted.tolist()):
        index, local = locate(rows, row)
        for slot, number in zip(
            range(row_starts[place], row_starts[place + 1]), samples_of_row(index, local), strict=True
        ):
            ours, alone = examples.example(slot), example_of(index, number)
            for name in ("input_ids", "token_type_ids", "prediction_positions", "prediction_labels"):
                assert np.array_equal(getattr(ours, name), getattr(alone, name)), name
            assert ours.sequence_label == alone.sequence_label


def test_ranges() -> None:
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tolist() == []


@pytest.mark.parametrize("sample_format", FORMATS)
def test_a_damaged_index_is_named_and_never_read_beyond_the_dataset(tmp_path: Path, sample_format: str) -> None:
    """Every field of a record overwritten: an error, or a sample that is what the record now says."""
    prefix = write_dataset(tmp_path / "d", random_documents(20), eod_id=TOKENIZER.sep_id)
    index = build_sample_index(prefix, TOKENIZER, config_of(sample_format))
    path = index.directory / "samples.npy"
    whole = path.read_bytes()
    tokens, refused = IndexedDataset(prefix).tokens, 0
    used = index.records.dtype.names if index.format.makes_pairs else ("a_start", "a_end", "num_tokens")
    for field in used:
        for value in (-1, -(2**62), 2**62, 2**31 - 1, 127, 0, 1):
            records = np.lib.format.open_memmap(path, mode="r+")
            if abs(value) > np.iinfo(records.dtype[field]).max:
                continue
            records[field][3] = value
            del records
            opened = IndexPlace.of(prefix, TOKENIZER, config_of(sample_format)).open(TOKENIZER)
            try:
                sample = sample_of(opened, 3)
            except DataError as error:
                assert "sample 3 of its index does not fit the dataset" in str(error)
                refused += 1
            else:
                text = sample.input_ids[~sample.special_mask]
                a_start, a_end, b_start, b_end = opened.records[3].tolist()[:4]
                again = np.concatenate([tokens[a_start:a_end], tokens[b_start:b_end]])
                assert np.array_equal(text, again[again != TOKENIZER.sep_id] if sample_format != "blocks" else again)
            path.write_bytes(whole)
    assert refused >= 8


@pytest.mark.parametrize("token", [1000, 65_535, -1, 2**31 - 1])
def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, token: int) -> None:
    documents = random_documents(20)
    documents[7][0][0] = token
    config = run_config(data={"sample_format": "full_sentences"}, objective={"whole_word": True})
    objective = build_objective(config.objective, TOKENIZER)
    rows = build_rows([write_dataset(tmp_path / "d", documents)], TOKENIZER, config, objective)
    with pytest.raises(DataError, match=r"does not fit the dataset, whose tokens are below 1000; .* --verify"):
        for _, _ in zip(range(1 + len(rows) // 8), TrainLoader(rows, objective, config), strict=False):
            pass


@pytest.mark.parametrize(
    "name", ["masked_ids", "masked_offsets", "prediction_positions", "prediction_labels", "prediction_offsets"]
)
def test_damaged_masked_copies_are_named(tmp_path: Path, name: str) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(20))
    config = run_config(objective={"masking": "static"})
    index = build_sample_index(prefix, TOKENIZER, config, build_objective(config.objective, TOKENIZER))
    values = np.lib.format.open_memmap(index.directory / f"{name}.npy", mode="r+")
    values[:] = np.iinfo(values.dtype).max
    del values
    with pytest.raises(DataError, match=r"the masked copy of sample 5 is damaged; delete the folder"):
        example_of(IndexPlace.of(prefix, TOKENIZER, config).open(TOKENIZER), 5)


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
        opened = IndexPlace.of(prefix, TOKENIZER, config).open(TOKENIZER)
        with pytest.raises(DataError, match=message):
            RowSource([opened]).samples(np.array([1, 2]), np.zeros(2, dtype=np.int64))
        path.write_bytes(whole)
