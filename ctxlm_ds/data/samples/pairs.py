"""What segment pairs and sentence pairs have in common: the random next segment and truncation.

Source: google-research/bert create_pretraining_data.py (create_instances_from_document, truncate_seq_pair).
"""

from __future__ import annotations

from typing import Protocol

from ctxlm_ds.data.samples.record import Record
from ctxlm_ds.data.samples.sentence_table import SentenceTable

TRIES_FOR_ANOTHER_DOCUMENT = 10


class Draws(Protocol):
    """Single random draws; Python's `random.Random` fits as well."""

    def random(self) -> float: ...

    def randint(self, low: int, high: int, /) -> int: ...


def another_document(document: int, num_documents: int, draws: Draws) -> int:
    """A document drawn anew up to ten times until it is another one.

    The original keeps the tenth draw even if it is the same document and then calls its own text random; here the next
    document stands in (of two documents it is needed once in a thousand pairs, of many never).
    """
    for _ in range(TRIES_FOR_ANOTHER_DOCUMENT):
        drawn = draws.randint(0, num_documents - 1)
        if drawn != document:
            return drawn
    return (document + 1) % num_documents


def random_segment(table: SentenceTable, document: int, target: int, draws: Draws) -> tuple[int, int]:
    """Token range in another document: from a random sentence on, until `target` tokens or the document's end."""
    other = another_document(document, table.num_documents, draws)
    first, end = int(table.documents[other]), int(table.documents[other + 1])
    first += draws.randint(0, end - first - 1)
    start = int(table.starts[first])
    last = first
    while last < end - 1 and table.ends[last] - start < target:
        last += 1
    return start, int(table.ends[last])


def pair_record(
    first: tuple[int, int], second: tuple[int, int], is_random: bool, room: int, specials: int, draws: Draws
) -> Record:
    """A pair shortened to `room` tokens: one at a time off the longer (B if equal), front or back by a coin."""
    a_start, a_end = first
    b_start, b_end = second
    for _ in range(a_end - a_start + b_end - b_start - room):
        in_front = draws.random() < 0.5
        if a_end - a_start > b_end - b_start:
            if in_front:
                a_start += 1
            else:
                a_end -= 1
        elif in_front:
            b_start += 1
        else:
            b_end -= 1
    return a_start, a_end, b_start, b_end, a_end - a_start + b_end - b_start + specials, int(is_random)
