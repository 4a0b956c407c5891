"""Blocks of consecutive full sentences (FULL-SENTENCES of Liu 2019, section 4.2; fairseq's break mode `complete`).

Whole sentences are added while they fit into seq_length - 2 tokens; at a document's end the block goes on with the next
document after an extra separator, which counts. A sentence longer than a block, which fairseq would emit over-long, is
cut where a block is full, so no token is lost and none is out of bounds. In a dataset without --split-sentences the
sentences are unknown: it becomes a stream of full blocks, cut wherever a block ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.samples.record import Record, single_record
from ctxlm_ds.data.samples.sentence_table import SentenceTable
from ctxlm_ds.data.samples.template import SINGLE_SPECIALS


def full_sentences(table: SentenceTable, room: int) -> Iterator[Record]:
    """All blocks of at most `room` tokens (separators between documents included) of one pass over the corpus."""
    starts_document = np.zeros(table.num_sentences, dtype=np.int64)
    starts_document[table.documents[1:-1]] = 1
    yield from _blocks(table, room, starts_document, np.array([0, table.num_sentences]))


def doc_blocks(table: SentenceTable, room: int) -> Iterator[Record]:
    """The same with every document's end closing a block."""
    yield from _blocks(table, room, np.zeros(table.num_sentences, dtype=np.int64), table.documents)


def _blocks(
    table: SentenceTable, room: int, separators: NDArray[np.int64], groups: NDArray[np.int64]
) -> Iterator[Record]:
    """Fill blocks from each group of sentences on its own.

    Every sentence has a place on a line on which `separators[k]` more tokens stand before sentence k: a block is a
    stretch of at most `room` of that line.
    """
    lengths = table.ends - table.starts
    line_ends = np.cumsum(lengths + separators)
    line_starts = line_ends - lengths
    for begin, end in zip(groups[:-1].tolist(), groups[1:].tolist(), strict=True):
        sentence, offset = begin, 0
        while sentence < end:
            origin = int(line_starts[sentence]) + offset
            limit = origin + room
            after = bisect_right(line_ends, limit, sentence, min(end, sentence + room + 1))
            start = int(table.starts[sentence]) + offset
            may_cut = after < end and (lengths[after] > room or not table.is_split)
            cut = limit - int(line_starts[after]) if may_cut else 0
            if cut > 0:
                stop, used = int(table.starts[after]) + cut, room
            else:
                stop, used = int(table.ends[after - 1]), int(line_ends[after - 1]) - origin
            sentence, offset = after, max(0, cut)
            yield single_record(start, stop, used + SINGLE_SPECIALS)
