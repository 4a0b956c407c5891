"""The table of sentences, and what every format makes of it: parts of a dataset, empty sequences, threads, buffers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.formats.base import Making, SequenceTemplate
from ctxlm_ds.data.formats.loops import blocks, ranges, sentences
from ctxlm_ds.data.index.index import SampleIndex
from ctxlm_ds.data.index.record import SampleSettings, SourcePart
from ctxlm_ds.data.index.sentence_table import sentence_table
from ctxlm_ds.errors import DataError
from ctxlm_ds.registry import FORMATS as REGISTERED
from tests.sample_data import (
    FakeTokenizer,
    build_sample_index,
    ends_of,
    random_documents,
    run_config,
    sample_of,
    starts_of,
    table_of,
    write_dataset,
)

TOKENIZER = FakeTokenizer()
SEP = TOKENIZER.sep_id
FORMATS = ["segment_pair", "sentence_pair", "full_sentences", "doc_sentences"]


@given(
    shape=st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=8),
    has_eod=st.booleans(),
    part=st.tuples(st.integers(0, 8), st.integers(0, 8)),
)
@settings(max_examples=50, deadline=None)
def test_table_is_what_a_plain_reading_finds(
    tmp_path_factory: pytest.TempPathFactory, shape: list[list[int]], has_eod: bool, part: tuple[int, int]
) -> None:
    """Sentences of 0 to 3 tokens, with or without an end-of-document token behind each document's last sequence."""
    prefix = write_dataset(
        tmp_path_factory.mktemp("data") / "d", [[[9] * n for n in document] for document in shape],
        eod_id=SEP if has_eod else None,
    )  # fmt: skip
    first, after = min(part[0], len(shape)), min(max(part), len(shape))
    starts, ends, documents = [], [], [0]
    position = 0
    for number, document in enumerate(shape):
        for length in document:
            if length and first <= number < after:
                starts.append(position)
                ends.append(position + length)
            position += length
        position += has_eod and bool(document)
        if documents[-1] < len(starts):
            documents.append(len(starts))
    dataset = IndexedDataset(prefix)
    if not starts:
        with pytest.raises(DataError, match="no text"):
            sentence_table(dataset, SEP, (first, after))
        return
    table = sentence_table(dataset, SEP, (first, after))
    assert starts_of(table).tolist() == starts and ends_of(table).tolist() == ends
    assert table.documents.tolist() == documents


def tokens_of(index: SampleIndex) -> list[list[int]]:
    return [sample_of(index, number).input_ids.tolist() for number in range(len(index.records))]


@pytest.mark.parametrize("sample_format", [*FORMATS, "blocks"])
def test_a_part_is_a_dataset_of_its_documents_alone(tmp_path: Path, sample_format: str) -> None:
    documents = random_documents(60, sentences=4, seed=4)
    eod = SEP if sample_format == "blocks" else None
    config = run_config(data={"sample_format": sample_format})
    whole = write_dataset(tmp_path / "whole", documents, eod_id=eod)
    alone = write_dataset(tmp_path / "alone", documents[20:45], eod_id=eod)
    part = build_sample_index(SourcePart(str(whole), (20, 45)), TOKENIZER, config)
    expected = build_sample_index(alone, TOKENIZER, config)
    assert part.meta["documents"] == 25 and part.meta["sentences"] == sum(map(len, documents[20:45]))
    assert tokens_of(part) == tokens_of(expected)


def test_parts_have_indexes_of_their_own_and_must_exist(tmp_path: Path) -> None:
    prefix = str(write_dataset(tmp_path / "d", random_documents(30, seed=1)))
    config = run_config(data={"sample_format": "doc_sentences"})
    parts = [SourcePart(prefix), SourcePart(prefix, (0, 30)), SourcePart(prefix, (0, 29)), SourcePart(prefix, (1, 30))]
    whole, same, *others = (build_sample_index(part, TOKENIZER, config) for part in parts)
    assert whole.directory == same.directory == build_sample_index(prefix, TOKENIZER, config).directory
    assert len({index.directory for index in (whole, *others)}) == 3
    assert len({index.random_key for index in (whole, *others)}) == 3
    for documents in ((0, 31), (-1, 3), (5, 4)):
        with pytest.raises(DataError, match=rf"documents {documents[0]} to {documents[1]} are asked for, it has 30"):
            build_sample_index(SourcePart(prefix, documents), TOKENIZER, config)


def records_of(table: Any, sample_format: str, workers: int) -> list[tuple[int, ...]]:
    values = SampleSettings(
        sample_format=sample_format, seq_length=64, num_duplicates=1, seed=3, packing=False,
        max_sequences_per_row=1, static_masking=None, own={"short_seq_prob": 0.1},
    )  # fmt: skip
    parts = REGISTERED.get(sample_format)().records(
        table, Making(SimpleNamespace(prefix="d"), (0, 1), values, SequenceTemplate.of(TOKENIZER), workers), 0
    )
    return [record for records in parts for record in records.tolist()]


@pytest.mark.parametrize("sample_format", FORMATS)
def test_threads_ranges_and_buffers_change_nothing(monkeypatch: pytest.MonkeyPatch, sample_format: str) -> None:
    table = table_of(random_documents(200, seed=6))
    expected = records_of(table, sample_format, 1)
    assert expected == records_of(table, sample_format, 3)
    monkeypatch.setattr(ranges, "document_ranges", partial(ranges.document_ranges, size=17))
    monkeypatch.setattr(sentences, "RECORDS_AT_ONCE", 3)
    assert expected == records_of(table, sample_format, 1) == records_of(table, sample_format, 4)


@pytest.mark.parametrize("slots", [1, 4])
def test_buffers_change_no_block(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    bounds = np.cumsum([0, *np.random.default_rng(2).integers(1, 40, size=300)])
    expected = [np.concatenate(parts).tolist() for parts in zip(*blocks.block_pieces(bounds, 16, slots), strict=True)]
    monkeypatch.setattr(blocks, "RECORDS_AT_ONCE", 5)
    found = [np.concatenate(parts).tolist() for parts in zip(*blocks.block_pieces(bounds, 16, slots), strict=True)]
    assert found == expected


def test_index_files_do_not_depend_on_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "document_ranges", partial(ranges.document_ranges, size=50))
    documents = random_documents(100, seed=7)
    config = run_config(data={"num_duplicates": 2, "packing": True})
    found = []
    for workers in (1, 4):
        prefix = write_dataset(tmp_path / str(workers) / "d", documents)
        directory = build_sample_index(prefix, TOKENIZER, config, workers=workers).directory
        found.append({path.name: path.read_bytes() for path in directory.glob("*.npy")})
    assert found[0] == found[1] and len(found[0]) == 3
