"""Dense rows of FULL-SENTENCES and DOC-SENTENCES against a plain reading of the definition, and rows of blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ctxlm_ds.data.formats.loops import running_text as loops
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


def block_rows(bounds: NDArray[np.int64], seq_length: int, slots: int) -> list[list[tuple[int, int]]]:
    """Rows of pieces (first token, token after the last)."""
    records, counts = zip(*loops.block_pieces(bounds, seq_length, slots), strict=True)
    pieces = np.concatenate(records)[["a_start", "a_end"]].tolist()
    ends = np.cumsum(np.concatenate(counts)).tolist()
    return [pieces[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    seq_length=st.integers(1, 24),
    slots=st.integers(1, 5),
)
@settings(max_examples=200)
def test_every_token_but_a_texts_first_is_predicted_once_and_rows_are_full(
    lengths: list[int], seq_length: int, slots: int
) -> None:
    bounds = np.cumsum([0, *lengths])
    rows = block_rows(bounds, seq_length, slots)
    predicted = [token for row in rows for start, stop in row for token in range(start + 1, stop)]
    assert predicted == [token for token in range(bounds[-1]) if token not in set(bounds.tolist())]
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    for row in rows:
        used = sum(stop - start - 1 for start, stop in row)
        assert 1 <= used <= seq_length and len(row) <= slots
        assert all(document_of[start] == document_of[stop - 1] for start, stop in row)
        assert used == seq_length or len(row) == slots or row is rows[-1]


@pytest.mark.parametrize("slots", [1, 4])
def test_buffers_change_no_block(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    bounds = np.cumsum([0, *np.random.default_rng(2).integers(1, 40, size=300)])
    expected = [np.concatenate(parts).tolist() for parts in zip(*loops.block_pieces(bounds, 16, slots), strict=True)]
    monkeypatch.setattr(loops, "RECORDS_AT_ONCE", 5)
    found = [np.concatenate(parts).tolist() for parts in zip(*loops.block_pieces(bounds, 16, slots), strict=True)]
    assert found == expected
