"""Rows of half a row of text and two segments (zihangdai/xlnet data_utils.py, `create_tfrecords`, `_split_a_and_b`).

All text of a dataset is one stream. A row begins where the first half of the row before it ends, so the tokens of A are
also those of the next row's first half. Backward the same is done with the stream from its last token to its first.
Places of the stream are counted in the direction of reading; cuts are the places between two sentences.

A record holds the tokens of A and B as ranges of the dataset, and `is_random` 1 if the row is read backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.formats.base import SequenceTemplate
from ctxlm_ds.data.formats.loops.framing import INTACT, Numbers, copy_tokens
from ctxlm_ds.data.index.record import RECORDS_AT_ONCE, SAMPLE_DTYPE
from ctxlm_ds.data.numba_random import below, compiled, inlined, put, stream, uniform, word_at
from ctxlm_ds.data.sample import Samples

SPECIALS = 3
"""Two separators and the classification token."""
BACKWARD = 1


class TextStream(NamedTuple):
    """The tokens and sentences of some documents of a dataset."""

    offsets: NDArray[Any]
    """[sentences] UNALIGNED, where each sentence of the dataset begins, in units of 2^-shift tokens."""
    shift: int
    first_sentence: int
    num_sentences: int
    first: int
    after: int
    """The token after the last."""
    backward: bool


class RowSettings(NamedTuple):
    """One pass over a corpus in one direction."""

    half: int
    """Tokens of the first half."""
    room: int
    """Tokens of A and B together."""
    key: np.uint64
    """Key of the draws: numba_random.stream_key of the seed and the format."""
    duplicate: int


def rows_of(text: TextStream, settings: RowSettings) -> Iterator[NDArray[Any]]:
    """Yield the records of all rows of a stream in its order."""
    row = 0
    while row >= 0:
        records = np.zeros(RECORDS_AT_ONCE, dtype=SAMPLE_DTYPE)
        count, row = fill_rows(text, settings, row, records)
        yield records[:count]


@inlined
def cut_at(text: TextStream, number: int) -> int:
    """Return the place of cut `number`; cut 0 is the beginning of the stream, cut num_sentences its end."""
    sentence = text.num_sentences - number if text.backward else number
    token = text.after
    if sentence < text.num_sentences:
        token = text.offsets[text.first_sentence + sentence].value >> text.shift
    return text.after - token if text.backward else token - text.first


@compiled
def last_cut(text: TextStream, place: int) -> int:
    """Return the number of the last cut at a place or before it."""
    low, high = 0, text.num_sentences + 1
    while high - low > 1:
        middle = (low + high) // 2
        if cut_at(text, middle) <= place:
            low = middle
        else:
            high = middle
    return low


@compiled
def fill_rows(text: TextStream, settings: RowSettings, row: int, records: Any) -> tuple[int, int]:
    """Write the records of the rows from `row` on; return how many, and the next row, -1 after the last."""
    length = text.after - text.first
    for count in range(len(records)):
        begin = (row + 1) * settings.half
        if begin + settings.room >= length:
            return count, -1
        a_end, b_begin, b_end = choose_segments(text, settings, row, begin)
        if a_end >= length or b_end >= length:
            return count, -1
        record = records[count]
        if text.backward:
            record.a_start, record.a_end = text.after - a_end, text.after - begin
            record.b_start, record.b_end = text.after - b_end, text.after - b_begin
        else:
            record.a_start, record.a_end = text.first + begin, text.first + a_end
            record.b_start, record.b_end = text.first + b_begin, text.first + b_end
        record.num_tokens = settings.half + settings.room + SPECIALS
        record.is_random = text.backward
        row += 1
    return len(records), row


@compiled
def choose_segments(text: TextStream, settings: RowSettings, row: int, begin: int) -> tuple[int, int, int]:
    """Return the place after A, which begins at `begin`, and the two of B, together as long as the room.

    A ends at one of the cuts before the room is full, or if there is none at the first cut after it. B follows A up to
    that cut; or, with probability 0.5 and always if A ends there, it is text around a random place, up to the ends of
    its sentences.
    Then the longer of the two is shortened at its end, B if they are equally long.
    """
    length, state = text.after - text.first, stream(settings.key, settings.duplicate, row, text.backward)
    first = last_cut(text, begin) + 1
    number, cuts, before = first, 0, begin
    end = cut_at(text, number)
    while end - begin < settings.room:
        cuts += end > before
        before = end
        number += 1
        end = cut_at(text, number)
    a_end = end
    if cuts > 0:
        chosen, number, before = below(word_at(state, 1), cuts), first, begin
        a_end = cut_at(text, number)
        while a_end == before or chosen > 0:
            chosen -= a_end > before
            before = a_end
            number += 1
            a_end = cut_at(text, number)
    b_begin, b_end = a_end, end
    if cuts == 0 or uniform(word_at(state, 0)) < 0.5:
        wanted = max(1, settings.room - (a_end - begin))
        place = below(word_at(state, 2), length - wanted)
        b_begin = cut_at(text, last_cut(text, place))
        number = last_cut(text, place + wanted - 1) + 1
        b_end = min(length - 1, cut_at(text, number))
    a_size, b_size = a_end - begin, b_end - b_begin
    excess = a_size + b_size - settings.room
    off_a = min(max(0, a_size - b_size), excess)
    off_b = min(max(0, b_size - a_size), excess)
    rest = excess - off_a - off_b
    # Equally long segments are shortened by turns, B first.
    return a_end - off_a - rest // 2, b_begin, b_end - off_b - (rest + 1) // 2


@compiled
def frame_rows(
    tokens: NDArray[Any], template: SequenceTemplate, samples: Samples, slots: Numbers, records: Any, numbers: Numbers
) -> int:
    """Write half a row of text, A [SEP] B [SEP] [CLS]; arguments and result are those of the loops in framing.py."""
    for place in range(len(numbers)):
        record, slot = records[numbers[place]], slots[place]
        ids = samples.input_ids[samples.starts[slot] : samples.starts[slot + 1]]
        special = samples.special_mask[samples.starts[slot] : samples.starts[slot + 1]]
        length, half, backward = len(ids), len(ids) // 2, record.is_random == BACKWARD
        first_end = half + record.a_end - record.a_start
        b_size = length - SPECIALS - first_end
        if not (half < first_end and 0 < b_size == record.b_end - record.b_start):
            return place
        text = record.a_end if backward else record.a_start - half
        if not (
            copy_text(ids[:half], tokens, text, backward, template.vocab_size)
            and copy_text(ids[half:first_end], tokens, record.a_start, backward, template.vocab_size)
            and copy_text(ids[first_end + 1 : length - 2], tokens, record.b_start, backward, template.vocab_size)
        ):
            return place
        special[:] = False
        ids[first_end] = ids[length - 2] = template.sep_id
        special[first_end] = special[length - 2] = special[length - 1] = True
        ids[length - 1] = template.cls_id
        samples.second_starts[slot], samples.sequence_labels[slot] = first_end + 1, record.is_random
    return INTACT


@inlined
def copy_text(into: NDArray[np.int32], tokens: NDArray[Any], begin: int, backward: bool, vocab_size: int) -> bool:
    """Copy tokens from `begin` on in the direction of reading; return False as copy_tokens does."""
    intact = copy_tokens(into, tokens, begin, begin + len(into), vocab_size)
    if backward:
        put(into, into[::-1].copy())
    return intact
