"""From records of a sample index to token ids: the ranges of a record with the special tokens around them.

Every range and every token is checked as it is copied: a damaged file is an error, never a wrong sample. Each loop
writes samples `numbers` [c] of `records` into the places `slots` [c] of Samples, which has their lengths, and returns
INTACT, or the place in `numbers` of the first damaged sample. `tokens` and `table` are the complete dataset's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.formats.base import SequenceTemplate
from ctxlm_ds.data.index.sentence_table import (
    SentenceTable,
    document_at,
    document_end,
    end_of,
    first_sentence,
    sentence_at,
    start_of,
)
from ctxlm_ds.data.numba_random import compiled
from ctxlm_ds.data.sample import NO_LABEL, Samples

Numbers = NDArray[np.int64]
INTACT = -1
MOST_SEPARATORS = 2


@compiled
def frame_pairs(
    tokens: NDArray[Any], template: SequenceTemplate, samples: Samples, slots: Numbers, records: Any, numbers: Numbers
) -> int:
    """Write [CLS] A [SEP] B [SEP], or with two separators between A and B."""
    separators = 2 if template.double_separator else 1
    for place in range(len(numbers)):
        record, slot = records[numbers[place]], slots[place]
        ids = samples.input_ids[samples.starts[slot] : samples.starts[slot + 1]]
        special = samples.special_mask[samples.starts[slot] : samples.starts[slot + 1]]
        first_end = 1 + record.a_end - record.a_start
        second_begin = first_end + separators
        second_end = second_begin + record.b_end - record.b_start
        if second_end + 1 != len(ids) or record.is_random not in (0, 1):
            return place
        if not (
            copy_tokens(ids[1:first_end], tokens, record.a_start, record.a_end, template.vocab_size)
            and copy_tokens(ids[second_begin:second_end], tokens, record.b_start, record.b_end, template.vocab_size)
        ):
            return place
        ids[0], special[0] = template.cls_id, True
        ids[first_end:second_begin], special[first_end:second_begin] = template.sep_id, True
        ids[second_end], special[second_end] = template.sep_id, True
        special[1:first_end] = False
        special[second_begin:second_end] = False
        samples.second_starts[slot] = first_end + 1
        samples.sequence_labels[slot] = record.is_random
    return INTACT


@compiled
def frame_sentences(
    tokens: NDArray[Any],
    template: SequenceTemplate,
    table: SentenceTable,
    samples: Samples,
    slots: Numbers,
    records: Any,
    numbers: Numbers,
) -> int:
    """Write [CLS] and the record's range, with a separator after each document, or after each sentence as well."""
    for place in range(len(numbers)):
        record, slot = records[numbers[place]], slots[place]
        ids = samples.input_ids[samples.starts[slot] : samples.starts[slot + 1]]
        special = samples.special_mask[samples.starts[slot] : samples.starts[slot + 1]]
        position, text_end, separated = record.a_start, record.a_end, record.b_start > 0
        if not (0 <= record.b_start <= 1 + MOST_SEPARATORS and 0 <= position < text_end):
            return place
        ids[:], special[:] = template.sep_id, True
        ids[0] = template.cls_id
        after, filled = 1, max(1, record.b_start)
        sentence = sentence_at(table, position)
        document = document_at(table, sentence)
        while position < text_end and document + 1 < len(table.documents):
            end = end_of(table, sentence, document) if separated else document_end(table, document)
            end = min(end, text_end)
            after = filled + end - position
            if end < position or after > len(ids):
                return place
            if not copy_tokens(ids[filled:after], tokens, position, end, template.vocab_size):
                return place
            special[filled:after] = False
            sentence = sentence + 1 if separated else first_sentence(table, document + 1)
            ends_document = sentence == first_sentence(table, document + 1)
            filled = after + 1 + (separated and ends_document)
            document += ends_document
            position = start_of(table, sentence) if sentence < len(table.offsets) else text_end
        if not after + (not separated) <= len(ids) <= after + (MOST_SEPARATORS if separated else 1):
            return place
        samples.second_starts[slot], samples.sequence_labels[slot] = len(ids), NO_LABEL
    return INTACT


@compiled
def copy_blocks(
    tokens: NDArray[Any], template: SequenceTemplate, samples: Samples, slots: Numbers, records: Any, numbers: Numbers
) -> int:
    """Write the record's range without special tokens."""
    for place in range(len(numbers)):
        record, slot = records[numbers[place]], slots[place]
        ids = samples.input_ids[samples.starts[slot] : samples.starts[slot + 1]]
        if not copy_tokens(ids, tokens, record.a_start, record.a_end, template.vocab_size):
            return place
        samples.special_mask[samples.starts[slot] : samples.starts[slot + 1]] = False
        samples.second_starts[slot], samples.sequence_labels[slot] = len(ids), NO_LABEL
    return INTACT


@compiled
def copy_tokens(into: NDArray[np.int32], tokens: NDArray[Any], begin: int, end: int, vocab_size: int) -> bool:
    """Copy tokens begin to end; return False if the range does not exist or fit `into`, or a token is damaged."""
    if not 0 <= begin <= end <= len(tokens) or end - begin != len(into):
        return False
    source = tokens[begin:end]
    outside = 0
    for position in range(len(into)):
        token = int(source[position])
        outside += token < 0 or token >= vocab_size
        into[position] = token
    return outside == 0
