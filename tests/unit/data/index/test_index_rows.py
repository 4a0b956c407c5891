"""Reading samples in bulk: each as it is on its own, and damaged rows are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.data.index.build import IndexPlace, build_rows
from ctxlm_ds.data.index.index import RowSource, SampleIndex, ranges
from ctxlm_ds.data.sample import Samples
from ctxlm_ds.errors import DataError
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
    return build_rows(prefixes, TOKENIZER, config.row_settings)


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


def test_ranges() -> None:
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tolist() == []


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
