"""Blocks of consecutive full sentences of one document (DOC-SENTENCES of Liu 2019; fairseq's `complete_doc`).

As full_sentences, but a document's end ends the block: the last one of each document is shorter. The paper enlarges the
batch to make up for it; packing puts several short blocks into one row instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from ctxlm_ds.data.samples.full_sentences import doc_blocks
from ctxlm_ds.data.samples.record import Record
from ctxlm_ds.data.samples.sentence_table import SentenceTable


def doc_sentences(table: SentenceTable, room: int) -> Iterator[Record]:
    """All blocks of at most `room` tokens of one pass over the corpus, none across documents."""
    yield from doc_blocks(table, room)
