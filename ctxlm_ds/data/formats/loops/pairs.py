"""Segment pairs and sentence pairs: choosing A and B, the random next segment, truncation.

In three compiled steps over a range of documents: the format chooses the sentences of A and B (of a random next segment
only the draws: CHOICE_DTYPE), the random segments are fetched, long pairs are shortened. A document's decisions are the
words of one stream (data/numba_random.py), numbered in the order in which the original makes them, so they depend on
(seed, pass, document) alone. Fetching is a separate step because it goes to random places of a table larger than the
processor's cache: many fetches without a decision between them overlap. Source: google-research/bert
create_pretraining_data.py (create_instances_from_document, truncate_seq_pair).

ELECTRA's rows of one document are one segment or two (google-research/electra build_pretraining_dataset.py,
ExampleBuilder). A sentence that does not fit into the first segment goes to the second; a later, shorter one may still
go to the first. A segment is therefore not always a stretch of the document. A record holds the stretch of its row
(a_start, a_end), the length of the first segment (b_start) and what decides the rest: 2 · the first segment's target +
the coin (b_end).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.formats.base import SINGLE_SPECIALS, SequenceTemplate
from ctxlm_ds.data.formats.loops.framing import INTACT, Numbers, copy_tokens
from ctxlm_ds.data.index.record import SAMPLE_DTYPE
from ctxlm_ds.data.index.sentence_table import (
    SentenceTable,
    document_at,
    end_of,
    first_sentence,
    reaching,
    sentence_at,
    start_of,
)
from ctxlm_ds.data.numba_random import below, compiled, inlined, stream, uniform, word_at
from ctxlm_ds.data.sample import NO_LABEL, Samples

SHORTEST_TARGET = 2
SHORTEST_ROW = 5
ONE_SENTENCE = 1
TRIES_FOR_ANOTHER_DOCUMENT = 10
COINS = 1
"""Third integer of the streams of truncation; the streams of decisions have 0."""
CHOICE_DTYPE = np.dtype(
    [("pair", "<i8"), ("document", "<i8"), ("word", "<u8"), ("target", "<i8"), ("sentence", "<i8"), ("start", "<i8")]
)
"""A random next segment: the number of its pair, its document, the word that draws its first sentence there, and how
many tokens it should have; once it is fetched, that sentence and its first token."""


class PairSettings(NamedTuple):
    """One pass over a corpus."""

    room: int
    """Most tokens of A and B together (seq_length without the special tokens)."""
    specials: int
    short_seq_prob: float
    key: np.uint64
    """Key of the draws: numba_random.stream_key of the seed and the format."""
    duplicate: int
    random_next_prob: float = 0.5
    """Probability of a random next segment if the document continues."""
    by_sentences: bool = False
    """Draw the other document in proportion to its sentences (TinyBERT)."""
    exchanges: bool = False
    """Exchange A and B with that probability instead (ALBERT)."""


def make_pairs(
    choose: Callable[..., tuple[int, int]], table: SentenceTable, settings: PairSettings, documents: tuple[int, int]
) -> NDArray[Any]:
    """Return the records of the pairs that `choose` makes of a range of documents."""
    first, after = documents
    most = int(table.bounds[after] - table.bounds[first])
    records, a_sentences = np.empty(most, dtype=SAMPLE_DTYPE), np.empty(most, dtype=np.int64)
    choices = np.empty(most, dtype=CHOICE_DTYPE)
    count, num_random = choose(table, settings, first, after, records, a_sentences, choices)
    fetch_segments(table, records, choices[:num_random])
    shorten_pairs(settings, records[:count], a_sentences)
    return records[:count]


@compiled
def choose_segments(
    table: SentenceTable, settings: PairSettings, first: int, after: int, records: Any, a_sentences: Any, choices: Any
) -> tuple[int, int]:
    """Choose pairs of documents `first` to `after` - 1, and note the number of the first sentence of each A.

    For each document the target length is drawn once (with short_seq_prob from 2..room); sentences are gathered until
    it is reached; A is the first 1..n-1 of them; B is the rest, or with random_next_prob (always if the document has
    only one sentence left) a run of sentences from another document, and then the unused sentences are put back.
    With `exchanges` the two are exchanged instead, but a lone sentence still gets a run of another document, with the
    label of exchanged segments (google-research/albert create_pretraining_data.py).
    Return how many pairs there are (at most one per sentence), and how many of them have a random next segment.
    """
    count = num_random = 0
    for document in range(first, after):
        state = stream(settings.key, settings.duplicate, document, 0)
        target, drawn = settings.room, 1
        if uniform(word_at(state, 0)) < settings.short_seq_prob:
            target = SHORTEST_TARGET + below(word_at(state, 1), settings.room - SHORTEST_TARGET + 1)
            drawn = 2
        sentence, end = first_sentence(table, document), first_sentence(table, document + 1)
        while sentence < end:
            start, a_sentences[count] = start_of(table, sentence), sentence
            last = reaching(table, sentence, document, start + target)
            a_last = sentence
            if last > sentence:
                a_last += below(word_at(state, drawn), last - sentence)
                drawn += 1
            is_random, exchanged = last == sentence, False
            if not is_random:
                coin = uniform(word_at(state, drawn)) < settings.random_next_prob
                drawn += 1
                is_random, exchanged = coin and not settings.exchanges, coin and settings.exchanges
            a_end, b_end = end_of(table, a_last, document), end_of(table, last, document)
            if is_random:
                choice = choices[num_random]
                choice.pair, choice.target = count, target - (a_end - start)
                drawn = choose_segment(choice, table, document, settings.by_sentences, state, drawn)
                num_random += 1
                last = a_last
            record = records[count]
            record.a_start, record.a_end, record.b_start, record.b_end = start, a_end, a_end, b_end
            if exchanged:
                record.a_start, record.a_end, record.b_start, record.b_end = a_end, b_end, start, a_end
            record.is_random = is_random or exchanged
            sentence = last + 1
            count += 1
    return count, num_random


@compiled
def choose_sentence_pairs(
    table: SentenceTable, settings: PairSettings, first: int, after: int, records: Any, a_sentences: Any, choices: Any
) -> tuple[int, int]:
    """Choose pairs of single sentences, as choose_segments does.

    B is the sentence after A, or with random_next_prob (always after a document's last) one from another document, and
    then the sentence after A begins the next pair.
    """
    count = num_random = 0
    for document in range(first, after):
        state, drawn = stream(settings.key, settings.duplicate, document, 0), 0
        sentence, end = first_sentence(table, document), first_sentence(table, document + 1)
        while sentence < end:
            is_random = sentence == end - 1
            if not is_random:
                is_random = uniform(word_at(state, drawn)) < settings.random_next_prob
                drawn += 1
            start, a_end = start_of(table, sentence), end_of(table, sentence, document)
            a_sentences[count] = sentence
            b_end = a_end
            if is_random:
                choice = choices[num_random]
                choice.pair, choice.target = count, ONE_SENTENCE
                drawn = choose_segment(choice, table, document, settings.by_sentences, state, drawn)
                num_random += 1
                sentence += 1
            else:
                b_end = end_of(table, sentence + 1, document)
                sentence += 2
            record = records[count]
            record.a_start, record.a_end, record.b_start, record.b_end = start, a_end, a_end, b_end
            record.is_random = is_random
            count += 1
    return count, num_random


@inlined
def choose_segment(
    choice: Any, table: SentenceTable, document: int, by_sentences: bool, state: np.uint64, drawn: int
) -> int:
    """Draw where a segment of another document begins; return how many words are drawn so far.

    The document is drawn up to ten times until it is another one. The original keeps the tenth draw even if it is the
    same document and then calls its own text random; here the next document is taken instead (of two documents it is
    needed once in a thousand pairs, of many never).
    """
    num_documents = len(table.documents) - 1
    other = document
    if by_sentences:
        begin, after = first_sentence(table, document), first_sentence(table, document + 1)
        sentence = below(word_at(state, drawn), first_sentence(table, num_documents) - (after - begin))
        choice.document = document_at(table, sentence + (after - begin if sentence >= begin else 0))
        choice.word = word_at(state, drawn + 1)
        return drawn + 2
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


@compiled
def fetch_segments(table: SentenceTable, records: Any, choices: Any) -> None:
    """Fill in B of the random pairs: from its first sentence on, until its target or the document's end."""
    for choice in choices:
        begin, after = first_sentence(table, choice.document), first_sentence(table, choice.document + 1)
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


class SegmentSettings(NamedTuple):
    """One pass over a corpus (as PairSettings)."""

    seq_length: int
    specials: int
    """Number of special tokens of a row of two segments."""
    short_seq_prob: float
    one_segment_prob: float
    key: np.uint64
    duplicate: int


def make_rows(table: SentenceTable, settings: SegmentSettings, documents: tuple[int, int]) -> NDArray[Any]:
    """Return the records of a range of documents."""
    first, after = documents
    records = np.empty(int(table.bounds[after] - table.bounds[first]), dtype=SAMPLE_DTYPE)
    return records[: choose_rows(table, settings, first, after, records)]


@inlined
def goes_first(length: int, first: int, second: int, target: int, coin: bool) -> bool:
    """Return whether a sentence goes to the first segment, given the tokens of both segments so far."""
    return first == 0 or first + length < target or (coin and second == 0 and first < target)


@compiled
def choose_rows(table: SentenceTable, settings: SegmentSettings, first: int, after: int, records: Any) -> int:
    """Choose the rows of documents `first` to `after` - 1 and return their number (at most one per sentence).

    Each row draws its target length (the original draws it after the row before), whether it has one segment, and, at
    the first sentence that does not fit into the first segment, whether it goes there all the same.
    """
    count = 0
    for document in range(first, after):
        state, drawn = stream(settings.key, settings.duplicate, document, 0), 0
        sentence, end = first_sentence(table, document), first_sentence(table, document + 1)
        while sentence < end:
            row_target = settings.seq_length
            is_short = uniform(word_at(state, drawn)) < settings.short_seq_prob
            drawn += 1
            if is_short:
                row_target = SHORTEST_ROW + below(word_at(state, drawn), settings.seq_length - SHORTEST_ROW + 1)
                drawn += 1
            start = start_of(table, sentence)
            last = reaching(table, sentence, document, start + row_target)
            text_end = end_of(table, last, document)
            target = (row_target - settings.specials) // 2
            if uniform(word_at(state, drawn)) < settings.one_segment_prob:
                target = text_end - start + 1
            drawn += 1
            coin, in_first, in_second = False, 0, 0
            for number in range(sentence, last + 1):
                length = end_of(table, number, document) - start_of(table, number)
                if not goes_first(length, in_first, in_second, target, False) and in_second == 0 and in_first < target:
                    coin = uniform(word_at(state, drawn)) < 0.5
                    drawn += 1
                if goes_first(length, in_first, in_second, target, coin):
                    in_first += length
                else:
                    in_second += length
            in_first = min(in_first, settings.seq_length - SINGLE_SPECIALS)
            in_second = min(in_second, max(0, settings.seq_length - in_first - settings.specials))
            record = records[count]
            record.a_start, record.a_end = start, text_end
            record.b_start, record.b_end = in_first, 2 * target + coin
            record.num_tokens = in_first + in_second + (settings.specials if in_second else SINGLE_SPECIALS)
            record.is_random = NO_LABEL
            sentence = last + 1
            count += 1
    return count


@compiled
def frame_segments(
    tokens: NDArray[Any],
    template: SequenceTemplate,
    table: SentenceTable,
    samples: Samples,
    slots: Numbers,
    records: Any,
    numbers: Numbers,
) -> int:
    """Write [CLS] A [SEP], or [CLS] A [SEP] B [SEP]; arguments and result are those of the loops in framing.py."""
    separators = 2 if template.double_separator else 1
    for place in range(len(numbers)):
        record, slot = records[numbers[place]], slots[place]
        ids = samples.input_ids[samples.starts[slot] : samples.starts[slot + 1]]
        special = samples.special_mask[samples.starts[slot] : samples.starts[slot + 1]]
        first_end, target, coin = 1 + record.b_start, record.b_end >> 1, record.b_end & 1 != 0
        second_end = len(ids) - 1
        is_divided = first_end < second_end
        second_begin = first_end + separators if is_divided else second_end
        if not (1 < first_end <= second_end) or (is_divided and second_begin >= second_end):
            return place
        sentence = sentence_at(table, record.a_start)
        if not (0 <= record.a_start < record.a_end and start_of(table, sentence) == record.a_start):
            return place
        document = document_at(table, sentence)
        ids[:], special[:] = template.sep_id, True
        ids[0] = template.cls_id
        special[1:first_end] = False
        special[second_begin:second_end] = False
        in_first = in_second = end = 0
        while sentence < first_sentence(table, document + 1) and start_of(table, sentence) < record.a_end:
            start, end = start_of(table, sentence), end_of(table, sentence, document)
            if goes_first(end - start, in_first, in_second, target, coin):
                begin, stop = 1 + in_first, first_end
                in_first += end - start
            else:
                begin, stop = second_begin + in_second, second_end
                in_second += end - start
            size = max(0, min(end - start, stop - begin))
            if not copy_tokens(ids[begin : begin + size], tokens, start, start + size, template.vocab_size):
                return place
            sentence += 1
        is_complete = in_first >= first_end - 1 and in_second >= second_end - second_begin
        is_cut = in_first >= first_end  # then there is no room for a second segment
        if end != record.a_end or not is_complete or (is_cut and is_divided):
            return place
        samples.second_starts[slot], samples.sequence_labels[slot] = first_end + 1, NO_LABEL
    return INTACT
