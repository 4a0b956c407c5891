"""Rows of consecutive full sentences (docs/data.md).

Separated rows follow fairseq (data/token_block_utils_fast.pyx). The text is a stream in which a separator ends each
sentence and one more each document but the last. A row is [CLS] and a slice of the stream, so that it may begin with a
document's separator; a row without any text is left out, which fairseq does not do. A sentence longer than a row is cut
into rows, in dense rows at the end of the current one. A row begins where the one before it ends, so that one thread
walks the documents, at some nanoseconds per sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.formats.base import SINGLE_SPECIALS
from ctxlm_ds.data.index.record import RECORDS_AT_ONCE, SAMPLE_DTYPE
from ctxlm_ds.data.index.sentence_table import SentenceTable, end_of, first_sentence, start_of
from ctxlm_ds.data.numba_random import compiled
from ctxlm_ds.data.sample import NO_LABEL


def sentence_rows(
    table: SentenceTable, room: int, crosses: bool, separated: bool, documents: tuple[int, int]
) -> Iterator[NDArray[Any]]:
    """Yield the records of documents [first, after the last).

    `room` is the positions of a row next to [CLS] and one separator. A row that `crosses` continues after a document's
    end; `separated` sentences end with a separator each.
    """
    first, after = documents
    place = np.array([first, table.bounds[first], 0], dtype=np.int64)
    while place[0] < after:
        records = np.empty(RECORDS_AT_ONCE, dtype=SAMPLE_DTYPE)
        if separated:
            count = fill_separated_rows(table, room + 1, crosses, after, place, records)
        else:
            count = fill_dense_rows(table, room, crosses, after, place, records)
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
