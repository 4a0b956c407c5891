"""Pairs of single sentences (SENTENCE-PAIR + NSP of Liu 2019, section 4.2).

A is one natural sentence; B is the sentence after it, or with probability 0.5 (always after a document's last) one from
another document, and then the sentence after A begins the next pair. A pair beyond the room is shortened as BERT does.
These samples are short: the paper enlarges the batch to keep its tokens, packing does the same here.
"""

from __future__ import annotations

from collections.abc import Iterator

from ctxlm_ds.data.randomness import KeyedStreams, ScalarDraws
from ctxlm_ds.data.samples.pairs import Draws, pair_record, random_segment
from ctxlm_ds.data.samples.record import Record
from ctxlm_ds.data.samples.sentence_table import SentenceTable

PURPOSE = "sentence_pair"
ONE_SENTENCE = 1


def sentence_pairs(table: SentenceTable, room: int, specials: int, seed: int, duplicate: int) -> Iterator[Record]:
    """All pairs of one pass over the corpus (arguments as segment_pair.segment_pairs)."""
    streams = KeyedStreams(seed, PURPOSE)
    for document in range(table.num_documents):
        yield from document_pairs(table, document, room, specials, ScalarDraws(streams, (duplicate, document, 0)))


def document_pairs(table: SentenceTable, document: int, room: int, specials: int, draws: Draws) -> Iterator[Record]:
    """The pairs of one document."""
    begin, end = int(table.documents[document]), int(table.documents[document + 1])
    sentences = list(zip(table.starts[begin:end].tolist(), table.ends[begin:end].tolist(), strict=True))
    position = 0
    while position < len(sentences):
        is_random = position == len(sentences) - 1 or draws.random() < 0.5
        first = sentences[position]
        second = random_segment(table, document, ONE_SENTENCE, draws) if is_random else sentences[position + 1]
        position += 1 if is_random else 2
        yield pair_record(first, second, is_random, room, specials, draws)
