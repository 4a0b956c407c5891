"""Building sample indexes: where, with which room, what they say of themselves, and rows of several samples."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.index.build import WINDOW_SAMPLES, IndexPlace, excerpt, fit_rows, pack_samples
from ctxlm_ds.data.index.record import SourcePart
from ctxlm_ds.errors import DataError
from ctxlm_ds.objectives.base import build_objective
from tests.sample_data import build_sample_index, random_documents, run_config, write_dataset
from tests.unit.data.index.test_index import BERT, config_of, ids_of


def test_sample_index_dir(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "data" / "d", random_documents(10))
    index = build_sample_index(prefix, BERT, run_config(data={"sample_index_dir": str(tmp_path / "elsewhere" / "x")}))
    assert index.directory.parent == tmp_path / "elsewhere" / "x"


def test_an_index_that_cannot_fit_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(200))
    least = IndexedDataset(prefix).num_tokens * 900 * 37 // 64
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=least - 1000))
    with pytest.raises(DataError, match=r"needs at least .* GB \(data.num_duplicates 900\), the disk has"):
        build_sample_index(prefix, BERT, run_config(data={"num_duplicates": 900}))
    assert not list(tmp_path.glob("*.samples-*"))
    with pytest.raises(ValidationError, match="less than or equal to 1000"):
        run_config(data={"num_duplicates": 10**9})


def test_opening_what_was_not_built_names_the_command(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(5))
    with pytest.raises(DataError, match="ctxlm samples"):
        IndexPlace.of(prefix, BERT, config_of("full_sentences").row_settings).open(BERT)


def test_an_excerpt_leaves_nothing_and_says_what_it_is_of(tmp_path: Path) -> None:
    prefix, config = write_dataset(tmp_path / "d", random_documents(320, sentences=2)), config_of("full_sentences")
    objective = build_objective(config.objective, BERT)
    before = sorted(tmp_path.iterdir())
    with excerpt(str(prefix), BERT, config.row_settings, objective, 2) as (rows, told):
        assert rows.indexes[0].meta["dataset"]["documents"] == [0, 300]
        assert "only the first 300 of 320 documents" in told
        expected = build_sample_index(SourcePart(str(prefix), (0, 300)), BERT, config)
        assert rows.indexes[0].records.tobytes() == expected.records.tobytes()
        folder = rows.indexes[0].directory
    shutil.rmtree(expected.directory)
    assert not folder.parent.exists() and sorted(tmp_path.iterdir()) == before
    whole = build_sample_index(prefix, BERT, config)
    with excerpt(str(prefix), BERT, config.row_settings, objective, 2) as (rows, told):
        assert rows.indexes[0].directory == whole.directory and "all 320 documents" in told


def test_meta_tells_what_was_built(tmp_path: Path) -> None:
    documents = random_documents(10, seed=4)
    index = build_sample_index(write_dataset(tmp_path / "d", documents), BERT, config_of("doc_sentences", 64))
    meta = json.loads((index.directory / "meta.json").read_text())
    assert meta["documents"] == 10 and meta["sentences"] == sum(map(len, documents))
    assert meta["tokens"] == sum(len(ids) for ids in ids_of(index))
    assert meta["samples"] == meta["rows"] == len(index.records) == len(index)


def rows_of(lengths: np.ndarray, seq_length: int, most: int, seed: int = 0) -> list[list[int]]:
    rows = []
    for numbers, counts in pack_samples(lengths, seq_length, most, seed, 1):
        rows.extend(part.tolist() for part in np.split(numbers, np.cumsum(counts)[:-1]))
    return rows


@pytest.mark.parametrize(
    ("seq_length", "most", "count"), [(128, 8, WINDOW_SAMPLES + 1234), (128, 2, 3000), (512, 100, 3000), (64, 1, 3000)]
)
def test_rows_hold_every_sample_once_within_the_limits(seq_length: int, most: int, count: int) -> None:
    lengths = np.random.default_rng(0).integers(5, seq_length + 1, size=count)
    rows = rows_of(lengths, seq_length, most)
    assert sorted(chain.from_iterable(rows)) == list(range(count))
    assert all(lengths[row].sum() <= seq_length and 1 <= len(row) <= most for row in rows)


def test_rows_are_well_filled() -> None:
    lengths = np.random.default_rng(1).integers(5, 100, size=20_000)
    rows = rows_of(lengths, 128, 64)
    assert lengths.sum() / (len(rows) * 128) > 0.97


def plain_rows(lengths: list[int], seq_length: int, most: int) -> list[list[int]]:
    """Best fit, longest first; of rows with equal room the one that was touched last."""
    rows: list[list[int]] = []
    touched: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        rooms = {row: seq_length - sum(lengths[i] for i in rows[row]) for row in touched if len(rows[row]) < most}
        fitting = [row for row in touched if rooms.get(row, -1) >= lengths[item]]
        if fitting:
            least = min(rooms[row] for row in fitting)
            row = [row for row in fitting if rooms[row] == least][-1]
            touched.remove(row)
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(item)
        touched.append(row)
    return rows


def as_lists(items: np.ndarray, counts: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(items, np.cumsum(counts)[:-1])]


@pytest.mark.parametrize(("seq_length", "most"), [(10, 3), (63, 8), (64, 2), (65, 100), (512, 8), (1000, 4)])
def test_is_best_fit_read_plainly(seq_length: int, most: int) -> None:
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, seq_length + 1, size=200)
        assert as_lists(*fit_rows(lengths, seq_length, most)) == plain_rows(lengths.tolist(), seq_length, most)


def test_any_number_of_threads_gives_the_same_rows() -> None:
    lengths = np.random.default_rng(3).integers(5, 128, size=3 * WINDOW_SAMPLES)
    alone, together = (list(pack_samples(lengths, 128, 8, 1, workers)) for workers in (1, 3))
    assert len(alone) == len(together) == 3
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])


def test_depends_on_the_seed_and_mixes_neighbours() -> None:
    lengths = np.full(1000, 30)
    assert rows_of(lengths, 128, 4, 1) == rows_of(lengths, 128, 4, 1)
    assert rows_of(lengths, 128, 4, 1) != rows_of(lengths, 128, 4, 2)
    spread = [max(row) - min(row) for row in rows_of(lengths, 128, 4, 1)]
    assert np.median(spread) > 300
