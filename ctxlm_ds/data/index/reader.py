"""From lines of the sample index to Samples: the tokens, framed.

In: records, the dataset they point into. Out: Samples. Used for training and while the index is still being built.
Every range and every token is checked as it is read: a damaged file is an error, never a wrong sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.formats.loops.template import SequenceTemplate
from ctxlm_ds.data.index.sentence_table import document_token_bounds
from ctxlm_ds.data.numba_random import compiled
from ctxlm_ds.data.sample import NO_LABEL, Samples, empty_samples
from ctxlm_ds.errors import DataError
from ctxlm_ds.registry import FORMATS

if TYPE_CHECKING:
    from ctxlm_ds.data.dataset.reader import IndexedDataset

LONGEST_SAMPLE = 1 << 16
Numbers = NDArray[np.int64]
WHOLE = -1
"""What the loops below return where nothing is damaged; else the place in `numbers` of the damaged sample."""


class SampleReader:
    """Samples by number."""

    def __init__(
        self, records: NDArray[Any], dataset: IndexedDataset, template: SequenceTemplate, sample_format: str
    ) -> None:
        self.records = records
        self.template = template
        self.is_pair = FORMATS.get(sample_format).makes_pairs
        self._prefix = dataset.prefix
        self._tokens = np.asarray(dataset.tokens)
        self._is_block = sample_format == "blocks"
        if sample_format == "full_sentences":
            self._texts = document_token_bounds(dataset, template.sep_id)
        else:
            self._texts = np.zeros(1, dtype=np.int64), np.full(1, len(self._tokens))

    def read(self, numbers: NDArray[np.int64]) -> Samples:
        """Samples `numbers`, keyed by their number alone.

        Raises:
            DataError: the index or the dataset is damaged.
        """
        samples = empty_samples(self.lengths(numbers))
        self.fill(samples, np.arange(len(numbers)), numbers)
        samples.keys[:, 0] = numbers
        return samples

    def lengths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """[c] tokens of samples `numbers` [c], special ones included, and a block's last, which is a label only.

        Raises:
            DataError: there is no such sample, or its record is damaged.
        """
        outside = (numbers < 0) | (numbers >= len(self.records))
        if outside.any():
            raise self._damaged(int(numbers[outside.argmax()]))
        lengths = self.records["num_tokens"][numbers].astype(np.int64) + self._is_block
        outside = (lengths < 1) | (lengths > LONGEST_SAMPLE)
        if outside.any():
            raise self._damaged(int(numbers[outside.argmax()]))
        return lengths

    def second_starts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """[c] position from which token types are 1 (the sample's length where there is no B)."""
        if not self.is_pair:
            return self.lengths(numbers)
        return self.records["a_end"][numbers] - self.records["a_start"][numbers] + 2

    def fill(self, samples: Samples, slots: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Write samples `numbers` [c] into the places `slots` [c] of `samples`, which has their lengths; not the keys.

        Raises:
            DataError: the index or the dataset is damaged.
        """
        if self.is_pair:
            damaged = frame_pairs(samples, slots, self.records, numbers, self._tokens, self.template)
        elif self._is_block:
            damaged = copy_blocks(samples, slots, self.records, numbers, self._tokens, self.template.vocab_size)
        else:
            damaged = frame_texts(samples, slots, self.records, numbers, self._tokens, self._texts, self.template)
        if damaged != WHOLE:
            raise self._damaged(int(numbers[damaged]))

    def _damaged(self, number: int) -> DataError:
        return DataError(
            f"{self._prefix}: sample {number} of its index does not fit the dataset, whose tokens are below "
            f"{self.template.vocab_size}; run tools/inspect_dataset.py --verify, delete the folder of the index and "
            "build it again (tools/build_samples.py)"
        )


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
        samples.is_random_next[slot] = record.is_random
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
        samples.second_starts[slot], samples.is_random_next[slot] = len(ids), NO_LABEL
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
        samples.second_starts[slot], samples.is_random_next[slot] = len(ids), NO_LABEL
    return WHOLE


@compiled
def copy_tokens(into: NDArray[np.int32], tokens: NDArray[Any], begin: int, end: int, vocab_size: int) -> bool:
    """Copy tokens begin to end; False where that is no range of them or not `into`'s length, or a token is damaged."""
    if not 0 <= begin <= end <= len(tokens) or end - begin != len(into):
        return False
    source = tokens[begin:end]
    outside = 0
    for position in range(len(into)):
        token = int(source[position])
        outside += token < 0 or token >= vocab_size
        into[position] = token
    return outside == 0
