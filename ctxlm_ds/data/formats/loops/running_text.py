"""Rows of running text (docs/data.md): blocks for causal language models, and consecutive full sentences.

Blocks: the documents of a dataset one after another, cut into full rows. A piece is a range of tokens of which all but
the last are inputs, as in Megatron's GPTDataset. `reset_at_documents` decides what the text is that pieces are cut of:
each document (an end-of-document token is predicted and never an input; Megatron's --reset-attention-mask,
--reset-position-ids and --eod-mask-loss have an input without influence and label there), or the dataset. A row ends
when it is full or its sequence slots are; the rest is padding. So rows follow from the documents' lengths only.

Sentences: separated rows follow fairseq (data/token_block_utils_fast.pyx). The text is a stream in which a separator
ends each sentence and one more each document but the last. A row is [CLS] and a slice of the stream, so that it may
begin with a document's separator; a row without any text is left out, which fairseq does not do. A sentence longer than
a row is cut into rows, in dense rows at the end of the current one. A row begins where the one before it ends, so that
one thread walks the documents, at some nanoseconds per sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.formats.base import SINGLE_SPECIALS
from ctxlm_ds.data.index.record import RECORDS_AT_ONCE, SAMPLE_DTYPE
from ctxlm_ds.data.index.sentence_table import SentenceTable, end_of, ends_with_eod, first_sentence, start_of
from ctxlm_ds.data.numba_random import compiled
from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.errors import DataError


def text_bounds(
    dataset: IndexedDataset, eod_id: int, reset_at_documents: bool, documents: tuple[int, int]
) -> tuple[NDArray[np.int64], int]:
    """Return [t + 1] bounds of the texts of documents [first, after the last) in the token stream, and their number.

    Raises DataError if documents do not end with the end-of-document token, or nothing can be predicted.
    """
    if not ends_with_eod(dataset, eod_id):
        raise DataError(
            f"{dataset.prefix}: its documents do not end with the end-of-document token {eod_id}, which data."
            "sample_format blocks puts between documents; run ctxlm preprocess again with --append-eod"
        )
    first, after = documents
    places = np.unique(dataset.first_tokens(dataset.document_indices[first : after + 1]))
    bounds = places if reset_at_documents else places[[0, -1]]
    if int(np.diff(bounds).max(initial=0)) < 2:
        raise DataError(
            f"{dataset.prefix}: no text ({after - first} documents, all empty); check what was preprocessed"
        )
    return bounds.astype(np.int64), len(places) - 1


@compiled
def fill_pieces(bounds: Any, seq_length: int, max_pieces: int, place: Any, out: Any, counts: Any) -> tuple[int, int]:
    """Write rows of `seq_length` inputs in at most `max_pieces` of the texts, whose bounds are [t + 1], to fill `out`.

    `place` [4] is the text and the token where the next piece begins, the room left in the row and the pieces in it; it
    is updated. `counts` gets the pieces of each finished row. Return how many pieces and how many rows were finished.
    """
    text, start, room, pieces = place[0], place[1], place[2], place[3]
    count = rows = 0
    while text < len(bounds) - 1 and count < len(out):
        last = bounds[text + 1] - 1  # the last token is not an input
        if start >= last:
            text += 1
            start = bounds[text]
            continue
        stop = min(last, start + room)
        record = out[count]
        record.a_start = start
        record.a_end = stop + 1
        record.b_start = record.b_end = 0
        record.num_tokens = stop - start
        record.is_random = NO_LABEL
        count += 1
        room -= stop - start
        start = stop
        pieces += 1
        if room == 0 or pieces == max_pieces:
            counts[rows] = pieces
            rows += 1
            room, pieces = seq_length, 0
    place[0], place[1], place[2], place[3] = text, start, room, pieces
    return count, rows


def block_pieces(
    bounds: NDArray[np.int64], seq_length: int, max_pieces: int
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
    """Yield all rows of the texts: [n] records of pieces, and [r] pieces of each row that ends among them."""
    place = np.array([0, bounds[0], seq_length, 0], dtype=np.int64)
    while place[0] < len(bounds) - 1:
        records = np.empty(RECORDS_AT_ONCE, dtype=SAMPLE_DTYPE)
        counts = np.empty(RECORDS_AT_ONCE, dtype=np.int64)
        count, rows = fill_pieces(bounds, seq_length, max_pieces, place, records, counts)
        if place[0] == len(bounds) - 1 and place[3]:
            counts[rows] = place[3]
            rows += 1
        yield records[:count], counts[:rows]


def sentence_rows(
    table: SentenceTable, room: int, crosses: bool, separated: bool, documents: tuple[int, int]
) -> Iterator[NDArray[Any]]:
    """Yield the records of documents [first, after the last).

    `room` is the positions of a row next to [CLS] and one separator. A row that `crosses` continues after a document's
    end; `separated` sentences end with a separator each.
    """
    first, after = documents
    place = np.array([first, table.bounds[first], 0], dtype=np.int64)
    fill = fill_separated_rows if separated else fill_dense_rows
    while place[0] < after:
        records = np.empty(RECORDS_AT_ONCE, dtype=SAMPLE_DTYPE)
        count = fill(table, room + separated, crosses, after, place, records)
        yield records[:count]


@compiled
def fill_separated_rows(table: SentenceTable, room: int, crosses: bool, after: int, place: Any, out: Any) -> int:
    """Write rows of at most `room` positions behind [CLS] until `out` is full; return how many were written.

    A record's b_start is 1, which marks a separated row, plus the number of separators before its text; b_end is 0.
    `place` [3] int64, which is updated, is the document, sentence and offset in it where the next row begins. Behind
    the tokens of a sentence, its separator is the next offset, and that of its document the one after.
    """
    document, sentence, offset = place[0], place[1], place[2]
    count = 0
    while document < after and count < len(out):
        record = out[count]
        record.a_start = record.a_end = record.b_end = used = 0
        while document < after:
            start, length = start_of(table, sentence), end_of(table, sentence, document) - start_of(table, sentence)
            in_sentence = offset <= length
            size = length + 1 - offset if in_sentence else 1
            taken = min(size, room - used)
            if taken < size and used > 0 and table.is_split:
                break
            if offset < length and taken > 0:
                if record.a_end == 0:
                    record.a_start, record.b_start = start + offset, 1 + used
                record.a_end = start + min(length, offset + taken)
            continues_cut = in_sentence and offset > 0 and table.is_split
            used += taken
            offset += taken
            if taken < size:
                break
            is_last = sentence + 1 == first_sentence(table, document + 1)
            separator_follows = is_last and in_sentence and crosses and document + 1 < after
            if not separator_follows:
                sentence, offset, document = sentence + 1, 0, document + is_last
            if continues_cut or (is_last and not crosses):
                break
        if record.a_end > 0:
            record.num_tokens = 1 + used
            record.is_random = NO_LABEL
            count += 1
    place[0], place[1], place[2] = document, sentence, offset
    return count


@compiled
def fill_dense_rows(table: SentenceTable, room: int, crosses: bool, after: int, place: Any, out: Any) -> int:
    """Write rows of at most `room` tokens, separators between documents included; otherwise as fill_separated_rows."""
    document, sentence, offset = place[0], place[1], place[2]
    count = 0
    while document < after and count < len(out):
        start = start_of(table, sentence) + offset
        stop, used = start, 0
        while document < after:
            begin, end = start_of(table, sentence) + offset, end_of(table, sentence, document)
            separator = int(used > 0 and sentence == first_sentence(table, document))
            left = room - used - separator
            if end - begin > left:
                if left > 0 and (end - begin + offset > room or not table.is_split):
                    offset += left
                    stop, used = begin + left, room
                break
            stop, used = end, room - left + end - begin
            sentence, offset = sentence + 1, 0
            if sentence == first_sentence(table, document + 1):
                document += 1
                if not crosses:
                    break
        record = out[count]
        record.a_start = start
        record.a_end = stop
        record.b_start = record.b_end = 0
        record.num_tokens = used + SINGLE_SPECIALS
        record.is_random = NO_LABEL
        count += 1
    place[0], place[1], place[2] = document, sentence, offset
    return count
