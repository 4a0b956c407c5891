"""The loop that makes ELECTRA's rows: every sentence once, the same rows from any ranges of documents."""

from __future__ import annotations

import numpy as np

from ctxlm_ds.data.formats.loops.pairs import SegmentSettings, make_rows
from ctxlm_ds.data.index.sentence_table import document_ranges
from ctxlm_ds.data.numba_random import stream_key
from tests.sample_data import ends_of, random_documents, starts_of, table_of


def test_rows_cover_each_document_once_and_do_not_depend_on_the_ranges() -> None:
    table = table_of(random_documents(100, seed=5))
    settings = SegmentSettings(64, 3, 0.05, 0.1, stream_key(1, "doc_segments"), 0)
    records = make_rows(table, settings, (0, 100))
    assert np.isin(records["a_start"], starts_of(table)).all() and np.isin(records["a_end"], ends_of(table)).all()
    assert (records["a_start"][1:] == records["a_end"][:-1]).all() and records["a_end"][-1] == ends_of(table)[-1]
    parts = [make_rows(table, settings, documents) for documents in document_ranges(table.bounds, 64)]
    assert len(parts) > 5 and np.array_equal(np.concatenate(parts), records)
