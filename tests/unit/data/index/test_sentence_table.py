"""The table of sentences, parts of a dataset, and ranges of documents for threads."""

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
from ctxlm_ds.data.index.record import SampleSettings, SourcePart
from ctxlm_ds.data.index.sentence_table import document_at, document_ranges, sentence_at, sentence_table
from ctxlm_ds.errors import DataError
from ctxlm_ds.registry import FORMATS as REGISTERED
from tests.sample_data import (
    FakeTokenizer,
    build_sample_index,
    ends_of,
    random_documents,
    run_config,
    starts_of,
    table_of,
    write_dataset,
)
from tests.unit.data.index.test_index import ids_of

TOKENIZER = FakeTokenizer()
SEP = TOKENIZER.sep_id
FORMATS = ["segment_pair", "sentence_pair", "full_sentences", "doc_sentences"]


@given(
    shape=st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=8),
    has_eod=st.booleans(),
    part=st.tuples(st.integers(0, 8), st.integers(0, 8)),
)
@settings(max_examples=50)
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
    assert table.bounds.tolist() == documents
    found = [document_at(table, sentence) for sentence in range(table.num_sentences)]
    assert found == np.repeat(np.arange(table.num_documents), np.diff(table.bounds)).tolist()
    inside = [sentence_at(table, end - 1) for end in ends]
    assert inside == list(range(len(ends)))


@pytest.mark.parametrize("eod_id", [None, SEP])
def test_what_reads_samples_takes_no_memory_for_documents(tmp_path: Path, eod_id: int | None) -> None:
    """Ranks of a node share the mapped .idx, unless something is empty."""
    documents = random_documents(50, sentences=3)
    dataset = IndexedDataset(write_dataset(tmp_path / "full", documents, eod_id=eod_id))
    table = sentence_table(dataset, SEP)
    arrays, file = (table.offsets, table.documents), dataset.arrays.file
    assert all(np.shares_memory(array, file) for array in arrays) and table.document_ends.nbytes == 0
    gap = IndexedDataset(write_dataset(tmp_path / "gap", [*documents, [], *documents], eod_id=eod_id))
    assert len(sentence_table(gap, SEP).document_ends) == 100


@pytest.mark.parametrize("sample_format", [*FORMATS, "blocks", "chunks"])
def test_a_part_is_a_dataset_of_its_documents_alone(tmp_path: Path, sample_format: str) -> None:
    documents = random_documents(60, sentences=4, seed=4)
    eod = SEP if sample_format == "blocks" else None
    config = run_config(data={"sample_format": sample_format})
    whole = write_dataset(tmp_path / "whole", documents, eod_id=eod)
    alone = write_dataset(tmp_path / "alone", documents[20:45], eod_id=eod)
    part = build_sample_index(SourcePart(str(whole), (20, 45)), TOKENIZER, config)
    expected = build_sample_index(alone, TOKENIZER, config)
    assert part.meta["documents"] == 25 and part.meta["sentences"] == sum(map(len, documents[20:45]))
    assert ids_of(part) == ids_of(expected)


def records_of(table: Any, sample_format: str, workers: int) -> list[tuple[int, ...]]:
    values = SampleSettings(
        sample_format=sample_format, seq_length=64, num_duplicates=1, seed=3, packing=False,
        max_sequences_per_row=1, static_masking=None, own={"short_seq_prob": 0.1, "one_segment_prob": 0.1},
    )  # fmt: skip
    parts = REGISTERED.get(sample_format)().records(
        table, Making(SimpleNamespace(prefix="d"), (0, 1), values, SequenceTemplate.of(TOKENIZER), workers), 0
    )
    return [record for records in parts for record in records.tolist()]


@pytest.mark.parametrize("sample_format", [*FORMATS, "doc_segments"])
def test_threads_ranges_and_buffers_change_nothing(monkeypatch: pytest.MonkeyPatch, sample_format: str) -> None:
    table = table_of(random_documents(200, seed=6))
    expected = records_of(table, sample_format, 1)
    assert expected == records_of(table, sample_format, 3)
    ranges = "ctxlm_ds.data.index.sentence_table.document_ranges"
    monkeypatch.setattr(ranges, partial(document_ranges, size=17))
    monkeypatch.setattr("ctxlm_ds.data.formats.loops.running_text.RECORDS_AT_ONCE", 3)
    assert expected == records_of(table, sample_format, 1) == records_of(table, sample_format, 4)
