"""The two texts of each record as a pair (tasks such as MNLI and MRPC): [CLS] A [SEP] B [SEP]. No label is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from ctxlm_ds.data.formats.base import Making, RowFormat, SequenceTemplate
from ctxlm_ds.data.formats.pairs import PairSection
from ctxlm_ds.errors import DataError

if TYPE_CHECKING:
    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.data.formats.base import Fill, Numbers, Records
    from ctxlm_ds.data.index.sentence_table import SentenceTable
    from ctxlm_ds.data.sample import Samples

SEGMENTS = 2


class GivenPairsSection(PairSection):
    """Rows of the two texts of a record, the longer one cut first (ctxlm preprocess --join-keys)."""

    by_sentence: ClassVar[bool] = False

    sample_format: str = "given_pairs"


class GivenPairs(RowFormat):
    """Given pairs: every document of the dataset has two sequences."""

    name = "given_pairs"
    section = GivenPairsSection
    makes_pairs = True

    def records(self, table: SentenceTable, making: Making, duplicate: int) -> Iterator[Records]:
        import numpy as np

        from ctxlm_ds.data.index.record import RECORDS_AT_ONCE, SAMPLE_DTYPE

        sizes = np.diff(table.documents)
        wrong = np.flatnonzero(sizes != SEGMENTS)
        if len(wrong):
            raise DataError(
                f"{making.dataset.prefix}: data.sample_format {self.name} needs documents of {SEGMENTS} texts, but one "
                f"has {int(sizes[wrong[0]])}; preprocess it with --json-keys A B --join-keys"
            )
        room, specials = self.room(making), self.section.special_tokens(making.template.double_separator)
        starts = table.offsets["value"].reshape(-1, SEGMENTS) >> table.shift
        ends = np.stack([starts[:, 1], table.document_ends], axis=1)
        kept = longest_first(ends - starts, room)
        records = np.zeros(len(starts), dtype=SAMPLE_DTYPE)
        for number, name in enumerate("ab"):
            records[f"{name}_start"] = starts[:, number]
            records[f"{name}_end"] = starts[:, number] + kept[:, number]
        records["num_tokens"] = kept.sum(axis=1) + specials
        for first in range(0, len(records), RECORDS_AT_ONCE):
            yield records[first : first + RECORDS_AT_ONCE]

    def joins_sentences(self, data: object) -> bool:
        return False

    def reader(self, dataset: IndexedDataset, template: SequenceTemplate) -> Fill:
        import numpy as np

        from ctxlm_ds.data.formats.loops.framing import frame_pairs
        from ctxlm_ds.data.sample import NO_LABEL

        tokens = np.asarray(dataset.tokens)

        def fill(samples: Samples, slots: Numbers, records: Records, numbers: Numbers) -> int:
            place: int = frame_pairs(tokens, template, samples, slots, records, numbers)
            samples.sequence_labels[slots] = NO_LABEL
            return place

        return fill

    def second_starts(self, records: Records, numbers: Numbers, lengths: Numbers) -> Numbers:
        starts: Numbers = records["a_end"][numbers] - records["a_start"][numbers] + 2
        return starts


def longest_first(lengths: Numbers, room: int) -> Numbers:
    """Return how many tokens of each text remain if the longer one is cut until both fit.

    If both are longer than half of the room, each gets half of it, and the longer one, or of equals the second, an odd
    token (`longest_first` of tokenizers, which transformers' fast tokenizers call).

    Args:
        lengths: [n, 2] tokens of both texts.
        room: most tokens of both together.
    """
    import numpy as np

    shorter, longer = lengths.min(axis=1), lengths.max(axis=1)
    half = room // 2
    short = np.where(shorter + longer > room, np.minimum(shorter, half), shorter)
    long = np.minimum(longer, room - short)
    second_is_longer = lengths[:, 1] >= lengths[:, 0]
    return np.stack([np.where(second_is_longer, short, long), np.where(second_is_longer, long, short)], axis=1)
