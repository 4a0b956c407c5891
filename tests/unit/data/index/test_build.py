"""Building sample indexes: where, with which room, at the same time, and what they say of themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.index.build import IndexPlace, excerpt
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
