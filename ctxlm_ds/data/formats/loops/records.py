"""The samples of one pass over a corpus, in the format that the settings name, by several threads.

In: SentenceTable, SampleSettings. Out: structured arrays of records in the order of the documents, the same for any
number of threads: each range of documents is filled on its own (compiled, without Python's lock) and ranges are handed
on in order. Memory is bounded by the ranges under way, some megabytes each. Not here: blocks.py, which needs the
end-of-document tokens that a SentenceTable leaves out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.formats.loops.full_sentences import fill_sentence_blocks
from ctxlm_ds.data.formats.loops.pairs import CHOICE_DTYPE, PairSettings, fetch_segments, shorten_pairs
from ctxlm_ds.data.formats.loops.segment_pair import choose_segment_pairs
from ctxlm_ds.data.formats.loops.sentence_pair import choose_sentence_pairs
from ctxlm_ds.data.formats.loops.template import SINGLE_SPECIALS, SequenceTemplate
from ctxlm_ds.data.index.record import RECORDS_AT_ONCE, SAMPLE_DTYPE, SampleSettings
from ctxlm_ds.data.index.sentence_table import SentenceTable, require_pairs_possible
from ctxlm_ds.data.numba_random import stream_key
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.registry import FORMATS

Item = TypeVar("Item")
Result = TypeVar("Result")
Records = NDArray[Any]
"""[n] of SAMPLE_DTYPE."""
DocumentRange = tuple[int, int]

SMALLEST_ROOM = 2
SENTENCES_A_RANGE = 1 << 15


def sample_records(
    table: SentenceTable,
    prefix: object,
    settings: SampleSettings,
    template: SequenceTemplate,
    duplicate: int,
    workers: int = 1,
) -> Iterator[Records]:
    """All samples of pass `duplicate`.

    Raises:
        ConfigError: seq_length is too short for the format.
        DataError: no pairs can be drawn from this dataset.
    """
    sample_format = settings.sample_format
    is_pair = FORMATS.get(sample_format).makes_pairs
    specials = template.pair_specials if is_pair else SINGLE_SPECIALS
    room = settings.seq_length - specials
    if room < SMALLEST_ROOM:
        raise ConfigError(
            f"data.seq_length {settings.seq_length} leaves {room} tokens beside {specials} special ones; "
            f"{sample_format} needs at least {specials + SMALLEST_ROOM}"
        )
    if is_pair:
        require_pairs_possible(table, prefix, sample_format)
        fill = partial(pairs, table, pair_settings(settings, room, specials, duplicate), sample_format)
        return in_order(fill, document_ranges(table.documents), workers)
    if sample_format == "doc_sentences":
        return in_order(partial(doc_sentences, table, room), document_ranges(table.documents), workers)
    return full_sentences(table, room)


def pair_settings(settings: SampleSettings, room: int, specials: int, duplicate: int) -> PairSettings:
    """What compiled code needs of them; each format draws under a key of its own."""
    key = stream_key(settings.seed, settings.sample_format)
    return PairSettings(room, specials, settings.short_seq_prob, key, duplicate)


def pairs(table: SentenceTable, settings: PairSettings, sample_format: str, documents: DocumentRange) -> Records:
    """The pairs of a range of documents: segment_pair.py or sentence_pair.py."""
    choose: Callable[..., tuple[int, int]]
    choose = choose_segment_pairs if sample_format == "segment_pair" else choose_sentence_pairs
    first, after = documents
    most = int(table.documents[after] - table.documents[first])
    records, a_sentences = np.empty(most, dtype=SAMPLE_DTYPE), np.empty(most, dtype=np.int64)
    choices = np.empty(most, dtype=CHOICE_DTYPE)
    count, num_random = choose(table, settings, first, after, records, a_sentences, choices)
    fetch_segments(table, records, choices[:num_random])
    shorten_pairs(settings, records[:count], a_sentences)
    return records[:count]


def full_sentences(table: SentenceTable, room: int) -> Iterator[Records]:
    """FULL-SENTENCES: blocks that cross documents."""
    return _sentence_blocks(table, room, True, (0, table.num_documents))


def doc_sentences(table: SentenceTable, room: int, documents: DocumentRange) -> Records:
    """DOC-SENTENCES of a range of documents (Liu 2019; fairseq's `complete_doc`).

    As FULL-SENTENCES, but a document's end ends the block: the last one of each document is shorter. The paper enlarges
    the batch to make up for it; packing puts several short blocks into one row instead.
    """
    return np.concatenate([np.empty(0, dtype=SAMPLE_DTYPE), *_sentence_blocks(table, room, False, documents)])


def _sentence_blocks(table: SentenceTable, room: int, crosses: bool, documents: DocumentRange) -> Iterator[Records]:
    first, after = documents
    place = np.array([first, table.documents[first], 0], dtype=np.int64)
    while place[0] < after:
        records = np.empty(RECORDS_AT_ONCE, dtype=SAMPLE_DTYPE)
        yield records[: fill_sentence_blocks(table, room, crosses, after, place, records)]


def document_ranges(documents: NDArray[np.int64], size: int = SENTENCES_A_RANGE) -> Iterator[DocumentRange]:
    """Consecutive documents of about `size` sentences together, at least one document each."""
    first = 0
    while first < len(documents) - 1:
        after = int(np.searchsorted(documents, documents[first] + size, side="right")) - 1
        after = max(first + 1, after)
        yield first, after
        first = after


def in_order(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`work` of each item, in the items' order, by `workers` threads that are at most two items each ahead."""
    if workers == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        under_way: deque[Future[Result]] = deque()
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) == 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
