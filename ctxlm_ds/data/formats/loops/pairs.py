"""What segment pairs and sentence pairs have in common: the random next segment and truncation.

In three steps over a range of documents, all compiled: the format decides which sentences make A and B (of a random
next segment only the draws: Choice); the random segments are fetched; long pairs are shortened. A document's decisions
are the words of one stream (data/numba_random.py), numbered in the order in which the original makes them. Fetching is
a step of its own because it goes to random places of a table larger than the processor's cache: many fetches without a
decision between them overlap. Source: google-research/bert create_pretraining_data.py (create_instances_from_document,
truncate_seq_pair).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.index.record import SAMPLE_DTYPE
from ctxlm_ds.data.index.sentence_table import SentenceTable, end_of, reaching, start_of
from ctxlm_ds.data.numba_random import below, compiled, inlined, stream, word_at

TRIES_FOR_ANOTHER_DOCUMENT = 10
COINS = 1
"""Third integer of the streams of truncation; those of decisions have 0."""
CHOICE_DTYPE = np.dtype(
    [("pair", "<i8"), ("document", "<i8"), ("word", "<u8"), ("target", "<i8"), ("sentence", "<i8"), ("start", "<i8")]
)
"""A random next segment: of which pair, its document, the word that draws its first sentence there, and how many tokens
it should have; then, when it is fetched, that sentence and its first token."""


class PairSettings(NamedTuple):
    """One pass over a corpus."""

    room: int
    """Most tokens of A and B together (seq_length without the special tokens)."""
    specials: int
    """Number of special tokens."""
    short_seq_prob: float
    key: np.uint64
    """Of the draws: native.stream_key of the seed and the format."""
    duplicate: int
    """Number of the pass."""


def make_pairs(
    choose: Callable[..., tuple[int, int]], table: SentenceTable, settings: PairSettings, documents: tuple[int, int]
) -> NDArray[Any]:
    """Return the records of a range of documents, which `choose` of segment_pair.py or sentence_pair.py cuts."""
    first, after = documents
    most = int(table.documents[after] - table.documents[first])
    records, a_sentences = np.empty(most, dtype=SAMPLE_DTYPE), np.empty(most, dtype=np.int64)
    choices = np.empty(most, dtype=CHOICE_DTYPE)
    count, num_random = choose(table, settings, first, after, records, a_sentences, choices)
    fetch_segments(table, records, choices[:num_random])
    shorten_pairs(settings, records[:count], a_sentences)
    return records[:count]


@inlined
def choose_segment(choice: Any, table: SentenceTable, document: int, state: np.uint64, drawn: int) -> int:
    """Draw where a segment of another document begins; the words drawn so far.

    The document is drawn anew up to ten times until it is another one. The original keeps the tenth draw even if it is
    the same document and then calls its own text random; here the next document stands in (of two documents it is
    needed once in a thousand pairs, of many never).
    """
    num_documents = len(table.documents) - 1
    other = document
    for _ in range(TRIES_FOR_ANOTHER_DOCUMENT):
        other = below(word_at(state, drawn), num_documents)
        drawn += 1
        if other != document:
            break
    else:
        other = (document + 1) % num_documents
    choice.document = other
    choice.word = word_at(state, drawn)
    return drawn + 1


@inlined
def write_choice(record: Any, a_start: int, a_end: int, b_start: int, b_end: int, is_random: bool) -> None:
    """Write down A, and B unless it is random."""
    record.a_start = a_start
    record.a_end = a_end
    record.b_start = b_start
    record.b_end = b_end
    record.is_random = is_random


@compiled
def fetch_segments(table: SentenceTable, records: Any, choices: Any) -> None:
    """Fill in B of the random pairs: from its first sentence on, until its target or the document's end."""
    for choice in choices:
        begin, after = table.documents[choice.document], table.documents[choice.document + 1]
        choice.sentence = begin + below(choice.word, after - begin)
    for choice in choices:
        choice.start = start_of(table, choice.sentence)
    for choice in choices:
        last = reaching(table, choice.sentence, choice.document, choice.start + choice.target)
        record = records[choice.pair]
        record.b_start = choice.start
        record.b_end = end_of(table, last, choice.document)


@compiled
def shorten_pairs(settings: PairSettings, records: Any, a_sentences: Any) -> None:
    """Shorten pairs to the room: one token at a time off the longer (B if equal), front or back by a coin.

    Coins are keyed by the pass and A's first sentence: coin j is bit j mod 64 of word j div 64.
    """
    for pair in range(len(records)):
        record = records[pair]
        a_start, a_end, b_start, b_end = record.a_start, record.a_end, record.b_start, record.b_end
        excess = a_end - a_start + b_end - b_start - settings.room
        if excess > 0:
            coins = stream(settings.key, settings.duplicate, a_sentences[pair], COINS)
            bits = np.uint64(0)
            for coin in range(excess):
                if coin & 63 == 0:
                    bits = word_at(coins, coin >> 6)
                in_front = bits & np.uint64(1) != 0
                bits >>= np.uint64(1)
                off_a = a_end - a_start > b_end - b_start
                a_start += off_a and in_front
                a_end -= off_a and not in_front
                b_start += not off_a and in_front
                b_end -= not off_a and not in_front
            record.a_start, record.a_end, record.b_start, record.b_end = a_start, a_end, b_start, b_end
        record.num_tokens = a_end - a_start + b_end - b_start + settings.specials
