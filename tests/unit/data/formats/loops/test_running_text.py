"""Dense rows of FULL-SENTENCES and DOC-SENTENCES against a plain reading of the definition."""

from __future__ import annotations

import numpy as np
import pytest

from ctxlm_ds.data.formats.loops.running_text import sentence_rows
from ctxlm_ds.data.index.sentence_table import SentenceTable
from tests.sample_data import Documents, ends_of, random_documents, starts_of, table_of

SEPARATOR = -1


def full_sentences(table: SentenceTable, room: int) -> list[tuple[int, ...]]:
    """All blocks of one pass."""
    blocks = sentence_rows(table, room, True, False, (0, table.num_documents))
    return [record for records in blocks for record in records.tolist()]


def greedy_blocks(documents: Documents, room: int) -> list[list[int]]:
    """Sentence by sentence; no sentence longer than a block is allowed here."""
    blocks: list[list[int]] = []
    block: list[int] = []
    for document in documents:
        needs_separator = bool(block)
        for sentence in document:
            added = ([SEPARATOR] if needs_separator else []) + sentence
            if block and len(block) + len(added) > room:
                blocks.append(block)
                block, added = [], sentence
            block = block + added
            needs_separator = False
    return [*blocks, block]


def read(documents: Documents, record: tuple[int, ...]) -> list[int]:
    """The tokens of a block, separators where a document ends inside it."""
    tokens = [token for document in documents for sentence in document for token in sentence]
    ends = set(np.cumsum([sum(map(len, document)) for document in documents]).tolist())
    block: list[int] = []
    for position in range(record[0], record[1]):
        if position in ends and block:
            block.append(SEPARATOR)
        block.append(tokens[position])
    return block


@pytest.mark.parametrize("room", [40, 62, 126, 510])
def test_equals_greedy_filling(room: int) -> None:
    documents = random_documents(80, sentences=6, tokens=20, seed=room)
    records = full_sentences(table_of(documents), room)
    blocks = [read(documents, record) for record in records]
    assert blocks == greedy_blocks(documents, room)
    assert [record[4] for record in records] == [len(block) + 2 for block in blocks]


@pytest.mark.parametrize("room", [5, 17, 62])
def test_long_sentences_are_cut_without_losing_a_token(room: int) -> None:
    documents = random_documents(40, sentences=4, tokens=60, seed=9)
    table = table_of(documents)
    records = full_sentences(table, room)
    assert all(record[4] <= room + 2 for record in records)
    assert records[0][0] == 0 and records[-1][1] == ends_of(table)[-1]
    assert all(left[1] == right[0] for left, right in zip(records, records[1:], strict=False))
    long_ones = ends_of(table) - starts_of(table) > room
    allowed = {0, *ends_of(table).tolist()}
    for start, *_ in records:
        sentence = int(np.searchsorted(ends_of(table), start, side="right"))
        assert start in allowed or long_ones[sentence]


def doc_sentences(table: SentenceTable, room: int) -> list[tuple[int, ...]]:
    """All rows of one pass."""
    rows = sentence_rows(table, room, False, False, (0, table.num_documents))
    return [record for records in rows for record in records.tolist()]


@pytest.mark.parametrize("room", [20, 62, 510])
def test_doc_sentences_are_full_sentences_of_each_document_alone(room: int) -> None:
    documents = random_documents(60, tokens=25, seed=room)
    expected, offset = [], 0
    for document in documents:
        for start, end, *rest in full_sentences(table_of([document]), room):
            expected.append((start + offset, end + offset, *rest))
        offset += sum(map(len, document))
    assert list(doc_sentences(table_of(documents), room)) == expected
