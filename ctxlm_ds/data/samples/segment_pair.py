"""BERT's segment pairs (SEGMENT-PAIR + NSP), drawn as google-research/bert create_pretraining_data.py draws them.

For each document: the target length is drawn once (with short_seq_prob from 2..room); sentences are gathered until it
is reached; A is the first 1..n-1 of them; B is the rest, or with probability 0.5 (always, where the document has only
one sentence left) a run of sentences from another document, and then the unused sentences are put back. Last, the
longer side is shortened. So each pass uses every sentence. A label of 1 means random, 0 that B follows A.

Draws are keyed by (pass, document): the same whatever is built before, and other pairs in each of num_duplicates
passes.
"""

from __future__ import annotations

from collections.abc import Iterator

from ctxlm_ds.data.randomness import KeyedStreams, ScalarDraws
from ctxlm_ds.data.samples.pairs import Draws, pair_record, random_segment
from ctxlm_ds.data.samples.record import Record
from ctxlm_ds.data.samples.sentence_table import SentenceTable

PURPOSE = "segment_pair"
SHORTEST_TARGET = 2


def segment_pairs(
    table: SentenceTable, room: int, specials: int, short_seq_prob: float, seed: int, duplicate: int
) -> Iterator[Record]:
    """All pairs of one pass over the corpus.

    Args:
        room: most tokens of A and B together (seq_length without the special tokens).
        specials: number of special tokens.
        duplicate: number of the pass.
    """
    streams = KeyedStreams(seed, PURPOSE)
    for document in range(table.num_documents):
        draws = ScalarDraws(streams, (duplicate, document, 0))
        yield from document_pairs(table, document, room, specials, short_seq_prob, draws)


def document_pairs(
    table: SentenceTable, document: int, room: int, specials: int, short_seq_prob: float, draws: Draws
) -> Iterator[Record]:
    """The pairs of one document, with the draws in the original's order."""
    begin, end = int(table.documents[document]), int(table.documents[document + 1])
    starts, ends = table.starts[begin:end].tolist(), table.ends[begin:end].tolist()
    target = draws.randint(SHORTEST_TARGET, room) if draws.random() < short_seq_prob else room
    first, last = 0, 0
    while first < len(starts):
        while last < len(starts) - 1 and ends[last] - starts[first] < target:
            last += 1
        count = last - first + 1
        a_last = first if count == 1 else first + draws.randint(1, count - 1) - 1
        segment_a = (starts[first], ends[a_last])
        is_random = count == 1 or draws.random() < 0.5
        if is_random:
            segment_b = random_segment(table, document, target - (ends[a_last] - starts[first]), draws)
            first = a_last + 1
        else:
            segment_b = (starts[a_last + 1], ends[last])
            first = last + 1
        last = first
        yield pair_record(segment_a, segment_b, is_random, room, specials, draws)
