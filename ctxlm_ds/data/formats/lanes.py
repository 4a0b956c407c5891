"""Lanes: row r of each batch continues row r of the batch before it, for models that carry a state.

In each epoch a keyed permutation puts the units of a dataset (documents or sequences) one after another. Row w of the
epoch is positions w·seq_length to (w + 1)·seq_length of that stream, and data/stream/blend.py gives each row of a batch
an even, contiguous part of the rows. So any step of any epoch is found by its number alone.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, ClassVar

from ctxlm_ds.data.formats.base import MadeSamples, Making, SampleFormat
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.sections import DataSection

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.data.formats.base import Fill, Numbers, Records, SequenceTemplate
    from ctxlm_ds.data.formats.loops.lanes import Units
    from ctxlm_ds.data.sample import Samples

ORDERS_KEPT = 4
"""Both directions of the epoch that ends and of the one that begins."""


class LanesSection(DataSection):
    """Documents in an order of each epoch, one after another; each row of a batch continues the same row of the batch
    before it."""

    in_lanes: ClassVar[bool] = True

    sample_format: str = "lanes"


class Lanes(SampleFormat):
    """Rows of the documents' tokens, without special tokens but the end of each document, if the dataset has it."""

    name = "lanes"
    section: ClassVar[type[DataSection]] = LanesSection
    marks: ClassVar[bool] = False
    """True if a unit begins with the tokenizer's beginning of a sequence."""
    by_document: ClassVar[bool] = True
    """True if units are documents; else each sequence is one, a sentence or a line."""
    lane_directions = 1

    def make(self, making: Making) -> MadeSamples:
        from ctxlm_ds.data.formats.loops.lanes import count_positions

        dataset, (first, after) = making.dataset, making.documents
        bounds = dataset.document_indices[[first, after]].tolist()
        units, (begin, end) = self._units(dataset), (first, after) if self.by_document else bounds
        positions = int(count_positions(units, begin, end))
        rows = (positions - self.shifted) // making.settings.seq_length
        if rows < 1:
            raise DataError(
                f"{dataset.prefix}: {positions} tokens are less than a row of data.seq_length "
                f"{making.settings.seq_length}; lower it, or check what was preprocessed"
            )
        pieces = ((records, None) for records in _records(rows, making.settings.seq_length, begin, end))
        return MadeSamples(after - first, bounds[1] - bounds[0], pieces)

    def token_counts(self, num_tokens: Numbers) -> Numbers:
        return (num_tokens + self.shifted) * self.lane_directions

    def second_starts(self, records: Records, numbers: Numbers, lengths: Numbers) -> Numbers:
        return lengths // self.lane_directions

    def reader(self, dataset: IndexedDataset, template: SequenceTemplate) -> Fill:
        return _reader(dataset, template, self._units(dataset), self.lane_directions)

    def _units(self, dataset: IndexedDataset) -> Units:
        import numpy as np

        from ctxlm_ds.data.formats.loops.lanes import Units
        from ctxlm_ds.data.index.sentence_table import UNALIGNED

        offsets, shift = dataset.arrays.offsets.view(UNALIGNED), dataset.arrays.token_offset.bit_length() - 1
        if self.by_document:
            starts = dataset.first_tokens(dataset.document_indices[:-1])
            offsets, shift = np.ascontiguousarray(starts, dtype=np.int64).view(UNALIGNED), 0
        view = offsets.view()
        view.flags.writeable = False
        return Units(view, shift, dataset.num_tokens, int(self.marks))


class BidirectionalLanesSection(LanesSection):
    """Sentences in an order of each epoch, each after its begin mark; and in lanes of another order the same sentences
    backward (ELMo)."""

    by_sentence: ClassVar[bool] = True

    sample_format: str = "bidirectional_lanes"


class BidirectionalLanes(Lanes):
    """The rows of bilm-tf (data.py, BidirectionalLMDataset): each direction has a separate order.

    A sample is the seq_length + 1 tokens of a row forward, then those backward; the last of each is only a label. A
    sentence begins with `cls_id`, backward with `sep_id`.
    """

    name = "bidirectional_lanes"
    section = BidirectionalLanesSection
    shifted = True
    marks = True
    by_document = False
    lane_directions = 2

    def make(self, making: Making) -> MadeSamples:
        from ctxlm_ds.data.index.sentence_table import ends_with_eod

        if making.dataset.metadata is not None and ends_with_eod(making.dataset, making.template.sep_id):
            raise DataError(
                f"{making.dataset.prefix}: its documents end with the end-of-document token, but data.sample_format "
                f"{self.name} marks the sentences; run ctxlm preprocess again without --append-eod"
            )
        return super().make(making)


def _reader(dataset: IndexedDataset, template: SequenceTemplate, units: Units, directions: int) -> Fill:
    """Return the function that writes samples, in the order of the epoch and index that their keys name."""
    import numpy as np

    from ctxlm_ds.data.formats.loops.framing import INTACT
    from ctxlm_ds.data.formats.loops.lanes import order_units, read_window
    from ctxlm_ds.data.sample import NO_LABEL

    tokens, orders = np.asarray(dataset.tokens), lru_cache(ORDERS_KEPT)(partial(order_units, units))

    def fill(samples: Samples, slots: Numbers, records: Records, numbers: Numbers) -> int:
        for place, (slot, record) in enumerate(zip(slots.tolist(), records[numbers], strict=True)):
            first, after, (_, epoch, index) = int(record["b_start"]), int(record["b_end"]), samples.keys[slot].tolist()
            if not 0 <= first < after <= len(units.starts):
                return place
            begin, end = int(samples.starts[slot]), int(samples.starts[slot + 1])
            size = (end - begin) // directions
            for direction in range(directions):
                part = slice(begin + direction * size, begin + (direction + 1) * size)
                order = orders(first, after, index, epoch, direction)
                is_intact = read_window(
                    samples.input_ids[part], samples.special_mask[part], tokens, template, units, order,
                    int(record["a_start"]), direction == 1,
                )  # fmt: skip
                if not is_intact:
                    return place
            samples.second_starts[slot], samples.sequence_labels[slot] = size, NO_LABEL
        return INTACT

    return fill


def _records(rows: int, size: int, first: int, after: int) -> Iterator[Records]:
    """Yield the records of rows: positions of an epoch's stream (A), and the units that it has (B)."""
    import numpy as np

    from ctxlm_ds.data.index.record import RECORDS_AT_ONCE, SAMPLE_DTYPE
    from ctxlm_ds.data.sample import NO_LABEL

    for begin in range(0, rows, RECORDS_AT_ONCE):
        starts: NDArray[np.int64] = np.arange(begin, min(rows, begin + RECORDS_AT_ONCE), dtype=np.int64) * size
        records = np.zeros(len(starts), dtype=SAMPLE_DTYPE)
        records["a_start"], records["a_end"] = starts, starts + size
        records["b_start"], records["b_end"] = first, after
        records["num_tokens"], records["is_random"] = size, NO_LABEL
        yield records
