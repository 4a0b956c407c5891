"""From lines of a sample index to token ids: the record's ranges with the special tokens around them.

Every range and every token is checked as it is copied: a damaged file is an error, never a wrong sample. Each loop
writes samples `numbers` [c] into the places `slots` [c] of Samples, which has their lengths, and returns WHOLE, or the
place in `numbers` of the first damaged sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.formats.loops.template import SequenceTemplate
from ctxlm_ds.data.numba_random import compiled
from ctxlm_ds.data.sample import NO_LABEL, Samples

Numbers = NDArray[np.int64]
WHOLE = -1


@compiled
def frame_pairs(
    samples: Samples, slots: Numbers, records: Any, numbers: Numbers, tokens: NDArray[Any], template: SequenceTemplate
) -> int:
    """[CLS] A [SEP] B [SEP], or with two separators between A and B."""
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
    return WHOLE


@compiled
def frame_texts(
    samples: Samples,
    slots: Numbers,
    records: Any,
    numbers: Numbers,
    tokens: NDArray[Any],
    texts: tuple[Numbers, Numbers],
    template: SequenceTemplate,
) -> int:
    """[CLS] text [SEP] text ... [SEP]: the parts of the record's range that lie in each text (a document, or all)."""
    text_starts, text_ends = texts
    for place in range(len(numbers)):
        record, slot = records[numbers[place]], slots[place]
        ids = samples.input_ids[samples.starts[slot] : samples.starts[slot + 1]]
        special = samples.special_mask[samples.starts[slot] : samples.starts[slot + 1]]
        ids[0], special[0], filled = template.cls_id, True, 1
        text = max(0, np.searchsorted(text_starts, record.a_start, side="right") - 1)
        while text < len(text_starts) and text_starts[text] < record.a_end:
            begin, end = max(record.a_start, text_starts[text]), min(record.a_end, text_ends[text])
            after = filled + end - begin
            if after >= len(ids) or not copy_tokens(ids[filled:after], tokens, begin, end, template.vocab_size):
                return place
            special[filled:after] = False
            ids[after], special[after], filled = template.sep_id, True, after + 1
            text += 1
        if filled != len(ids):
            return place
        samples.second_starts[slot], samples.sequence_labels[slot] = len(ids), NO_LABEL
    return WHOLE


@compiled
def copy_blocks(
    samples: Samples, slots: Numbers, records: Any, numbers: Numbers, tokens: NDArray[Any], vocab_size: int
) -> int:
    """The record's range as it is."""
    for place in range(len(numbers)):
        record, slot = records[numbers[place]], slots[place]
        ids = samples.input_ids[samples.starts[slot] : samples.starts[slot + 1]]
        if not copy_tokens(ids, tokens, record.a_start, record.a_end, vocab_size):
            return place
        samples.special_mask[samples.starts[slot] : samples.starts[slot + 1]] = False
        samples.second_starts[slot], samples.sequence_labels[slot] = len(ids), NO_LABEL
    return WHOLE


@compiled
def copy_tokens(into: NDArray[np.int32], tokens: NDArray[Any], begin: int, end: int, vocab_size: int) -> bool:
    """Copy tokens begin to end; False if that is no range of them or not `into`'s length, or a token is damaged."""
    if not 0 <= begin <= end <= len(tokens) or end - begin != len(into):
        return False
    source = tokens[begin:end]
    outside = 0
    for position in range(len(into)):
        token = int(source[position])
        outside += token < 0 or token >= vocab_size
        into[position] = token
    return outside == 0
