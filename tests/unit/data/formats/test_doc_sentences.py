"""DOC-SENTENCES: the same blocks, none across documents."""

from __future__ import annotations

import numpy as np
import pytest

from ctxlm_ds.data.formats.loops.full_sentences import sentence_blocks
from ctxlm_ds.data.index.sentence_table import SentenceTable
from tests.sample_data import numbered_documents, random_documents, table_of
from tests.unit.data.formats.test_full_sentences import full_sentences


def doc_sentences(table: SentenceTable, room: int) -> list[tuple[int, ...]]:
    """All blocks of one pass."""
    blocks = sentence_blocks(table, room, False, (0, table.num_documents))
    return [record for records in blocks for record in records.tolist()]


@pytest.mark.parametrize("room", [20, 62, 510])
def test_is_full_sentences_of_each_document_alone(room: int) -> None:
    documents = random_documents(60, tokens=25, seed=room)
    expected, offset = [], 0
    for document in documents:
        for start, end, *rest in full_sentences(table_of([document]), room):
            expected.append((start + offset, end + offset, *rest))
        offset += sum(map(len, document))
    assert list(doc_sentences(table_of(documents), room)) == expected


def test_never_crosses_and_covers_everything() -> None:
    documents = random_documents(100, seed=2)
    table = table_of(documents)
    document_of = np.repeat(np.arange(100), [sum(map(len, d)) for d in documents])
    records = doc_sentences(table, 100)
    assert all(document_of[start] == document_of[end - 1] for start, end, *_ in records)
    assert sum(end - start for start, end, *_ in records) == table.ends[-1]
    assert all(length == end - start + 2 for start, end, _, _, length, _ in records)


def test_short_documents_give_short_blocks() -> None:
    records = doc_sentences(table_of(numbered_documents([[5, 5], [1], [9, 9, 9]])), 20)
    assert [record[4] - 2 for record in records] == [10, 1, 18, 9]
