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

    section: ClassVar[type[DataSection]] = LanesSection
    marks: ClassVar[bool] = False
    """True if units are sequences (sentences or lines) that begin with the tokenizer's beginning; else documents."""
    lane_directions = 1

    def make(self, making: Making) -> MadeSamples:
        from ctxlm_ds.data.formats.loops.lanes import count_positions
        from ctxlm_ds.data.index.record import even_records

        dataset, length = making.dataset, making.settings.seq_length
        units = making.sentences if self.marks else making.documents
        positions = int(count_positions(self._units(dataset), *units))
        rows = (positions - self.shifted) // length
        if rows < 1:
            raise DataError(
                f"{dataset.prefix}: {positions} tokens are less than a row of data.seq_length {length}; lower it, or "
                "check what was preprocessed"
            )
        # A is positions of an epoch's stream, B the units that it has.
        return MadeSamples.of_all(making, even_records(0, rows * length, length, units))

    def token_counts(self, num_tokens: Numbers) -> Numbers:
        return (num_tokens + self.shifted) * self.lane_directions

    def second_starts(self, records: Records, numbers: Numbers, lengths: Numbers) -> Numbers:
        return lengths // self.lane_directions

    def reader(self, dataset: IndexedDataset, template: SequenceTemplate) -> Fill:
        """Return the function that writes samples, in the order of the epoch and index that their keys name."""
        import numpy as np

        from ctxlm_ds.data.formats.loops.framing import INTACT
        from ctxlm_ds.data.formats.loops.lanes import order_units, read_window
        from ctxlm_ds.data.sample import NO_LABEL

        units, tokens = self._units(dataset), np.asarray(dataset.tokens)
        orders = lru_cache(ORDERS_KEPT)(partial(order_units, units))

        def fill(samples: Samples, slots: Numbers, records: Records, numbers: Numbers) -> int:
            for place, (slot, record) in enumerate(zip(slots.tolist(), records[numbers], strict=True)):
                first, after = int(record["b_start"]), int(record["b_end"])
                _, epoch, index = samples.keys[slot].tolist()
                if not 0 <= first < after <= len(units.starts):
                    return place
                begin, end = int(samples.starts[slot]), int(samples.starts[slot + 1])
                size = (end - begin) // self.lane_directions
                for direction in range(self.lane_directions):
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

    def _units(self, dataset: IndexedDataset) -> Units:
        from ctxlm_ds.data.formats.loops.lanes import Units
        from ctxlm_ds.data.index.sentence_table import UNALIGNED, read_only, shift_of

        starts, shift = dataset.arrays.offsets, shift_of(dataset)
        if not self.marks:
            starts, shift = dataset.first_tokens(dataset.document_indices[:-1]), 0
        return Units(read_only(starts.view(UNALIGNED)), shift, dataset.num_tokens, int(self.marks))


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

    section = BidirectionalLanesSection
    shifted = True
    marks = True
    lane_directions = 2

    def make(self, making: Making) -> MadeSamples:
        from ctxlm_ds.data.index.sentence_table import ends_with_eod

        if making.dataset.metadata is not None and ends_with_eod(making.dataset, making.template.sep_id):
            raise DataError(
                f"{making.dataset.prefix}: its documents end with the end-of-document token, but data.sample_format "
                f"{self.name} marks the sentences; run ctxlm preprocess again without --append-eod"
            )
        return super().make(making)
