"""Rows of one document as one segment or two (google-research/electra build_pretraining_dataset.py, ExampleBuilder).

A sentence that does not fit into the first segment goes to the second; a later, shorter one may still go to the first.
A segment is therefore not always a stretch of the document. A record holds the stretch of its row (a_start, a_end), the
length of the first segment (b_start) and what decides the rest: 2 · the first segment's target + the coin (b_end).
"""

from __future__ import annotations

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

SHORTEST_TARGET = 5


class SegmentSettings(NamedTuple):
    """One pass over a corpus."""

    seq_length: int
    specials: int
    """Number of special tokens of a row of two segments."""
    short_seq_prob: float
    one_segment_prob: float
    key: np.uint64
    """Key of the draws: numba_random.stream_key of the seed and the format."""
    duplicate: int
    """Number of the pass."""


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
                row_target = SHORTEST_TARGET + below(word_at(state, drawn), settings.seq_length - SHORTEST_TARGET + 1)
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
