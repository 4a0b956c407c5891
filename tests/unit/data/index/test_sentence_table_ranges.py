"""Ranges of documents for threads: neither their size nor the threads change anything."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from ctxlm_ds.data.formats.base import Making, SequenceTemplate
from ctxlm_ds.data.formats.loops import running_text
from ctxlm_ds.data.index import sentence_table
from ctxlm_ds.data.index.record import SampleSettings
from ctxlm_ds.registry import FORMATS as REGISTERED
from tests.sample_data import random_documents, table_of
from tests.unit.data.index.test_sentence_table import FORMATS, TOKENIZER


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
    monkeypatch.setattr(sentence_table, "document_ranges", partial(sentence_table.document_ranges, size=17))
    monkeypatch.setattr(running_text, "RECORDS_AT_ONCE", 3)
    assert expected == records_of(table, sample_format, 1) == records_of(table, sample_format, 4)
