"""Blocks of consecutive full sentences (FULL-SENTENCES of Liu 2019, section 4.2; fairseq's break mode `complete`).

Whole sentences are added while they fit into seq_length - 2 tokens; at a document's end the block goes on with the next
document after an extra separator, which counts. A sentence longer than a block, which fairseq would emit over-long, is
cut where a block is full, so no token is lost and none is out of bounds. In a dataset without --split-sentences the
sentences are unknown: it becomes a stream of full blocks, cut wherever a block ends.

Where a block begins follows from the one before it, so that one thread walks the corpus, at some nanoseconds a
sentence; doc_sentences walks each document on its own with the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.formats.loops.template import SINGLE_SPECIALS
from ctxlm_ds.data.index.record import RECORDS_AT_ONCE, SAMPLE_DTYPE
from ctxlm_ds.data.index.sentence_table import SentenceTable, end_of, start_of
from ctxlm_ds.data.numba_random import compiled
from ctxlm_ds.data.sample import NO_LABEL


def sentence_blocks(
    table: SentenceTable, room: int, crosses: bool, documents: tuple[int, int]
) -> Iterator[NDArray[Any]]:
    """Yield the records of a range of documents; with `crosses` a block goes on beyond a document's end."""
    first, after = documents
    place = np.array([first, table.documents[first], 0], dtype=np.int64)
    while place[0] < after:
        records = np.empty(RECORDS_AT_ONCE, dtype=SAMPLE_DTYPE)
        yield records[: fill_sentence_blocks(table, room, crosses, after, place, records)]


@compiled
def fill_sentence_blocks(table: SentenceTable, room: int, crosses: bool, after: int, place: Any, out: Any) -> int:
    """Write blocks of at most `room` tokens (separators between documents included) until `out` is full.

    Args:
        crosses: a block goes on behind a document's end.
        after: number of the document to stop before.
        place: [3] int64, the document, sentence and token of that sentence where the next block begins; moved on.

    Returns:
        How many blocks were written.
    """
    document, sentence, offset = place[0], place[1], place[2]
    count = 0
    while document < after and count < len(out):
        start = start_of(table, sentence) + offset
        stop, used = start, 0
        while document < after:
            begin, end = start_of(table, sentence) + offset, end_of(table, sentence, document)
            separator = int(used > 0 and sentence == table.documents[document])
            left = room - used - separator
            if end - begin > left:
                if left > 0 and (end - begin + offset > room or not table.is_split):
                    offset += left
                    stop, used = begin + left, room
                break
            stop, used = end, room - left + end - begin
            sentence, offset = sentence + 1, 0
            if sentence == table.documents[document + 1]:
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
