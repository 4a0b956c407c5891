"""Pairs of segments: BERT's, ALBERT's in order, single sentences (Liu 2019), ELECTRA's, and the two texts of a record.

The first three have a label. ELECTRA's rows of one document are one segment or two (Clark 2020; google-research/electra
build_pretraining_dataset.py). Given pairs are [CLS] A [SEP] B [SEP] of tasks such as MNLI and MRPC; no label is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ctxlm_ds.data.formats.base import Making, RowFormat, RowSection, SequenceTemplate
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.sections import DataSection, Probability
from ctxlm_ds.registry import load_object

if TYPE_CHECKING:
    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.data.formats.base import Fill, Numbers, Records
    from ctxlm_ds.data.index.sentence_table import SentenceTable
    from ctxlm_ds.data.sample import Samples

RANDOM_NEXT = 0.5
"""BERT's share of random next segments."""
SEGMENTS = 2
DIVIDED_SETTINGS = ("short_seq_prob", "one_segment_prob")


class PairSection(RowSection):
    """Rows of two segments."""

    @staticmethod
    def special_tokens(double_separator: bool) -> int:
        return 4 if double_separator else 3


class SegmentsSection(PairSection):
    """Rows of two segments of several sentences each."""

    fixed: ClassVar[tuple[str, ...]] = (*PairSection.fixed, "short_seq_prob")

    short_seq_prob: Probability = 0.1
    """Share of documents whose target length is drawn shorter (BERT 0.1)."""


class SentenceOrderSection(SegmentsSection):
    """Rows of two segments that follow each other, half of them exchanged (ALBERT)."""

    sample_format: str = "sentence_order"


class SegmentPairSection(SegmentsSection):
    """Rows of two segments of several sentences each (BERT)."""

    fixed: ClassVar[tuple[str, ...]] = (*SegmentsSection.fixed, "random_next_prob", "random_next_weights")

    sample_format: str = "segment_pair"
    random_next_prob: Probability = RANDOM_NEXT
    """Share of pairs whose second segment is of another document although theirs continues (BERT 0.5). A document's
    last sentence alone always has one."""
    random_next_weights: Literal["documents", "sentences"] = "documents"
    """How the other document is drawn: each equally often (BERT), or in proportion to its sentences (TinyBERT)."""


class SentencePairSection(PairSection):
    """Rows of two single sentences (RoBERTa's SENTENCE-PAIR + NSP)."""

    sample_format: str = "sentence_pair"


class TwoSegments(RowFormat):
    """[CLS] A [SEP] B [SEP], A and B a stretch of text each."""

    makes_pairs = True
    framing = "ctxlm_ds.data.formats.loops.framing:frame_pairs"

    def second_starts(self, records: Records, numbers: Numbers, lengths: Numbers) -> Numbers:
        return records["a_end"][numbers] - records["a_start"][numbers] + 2


class PairFormat(TwoSegments):
    """A format of PairSection: two segments, the second one of the same document or of another."""

    sequence_label: ClassVar[str | None] = "next_sentence"
    sequence_labels = ("B follows A", "B is from another document")
    chooser: ClassVar[str] = "ctxlm_ds.data.formats.loops.pairs:choose_segments"
    """`module:function` of the compiled loop that chooses the pairs of a range of documents."""
    exchanges: ClassVar[bool] = False
    """True if A and B are exchanged where B would otherwise be of another document."""

    def records(self, table: SentenceTable, making: Making, duplicate: int) -> Iterator[Records]:
        from ctxlm_ds.data.formats.loops.pairs import PairSettings, make_pairs
        from ctxlm_ds.data.index.sentence_table import document_ranges, in_order
        from ctxlm_ds.data.numba_random import stream_key

        self.require_sentences(making, table.is_split)
        if table.num_documents < 2:
            raise DataError(
                f"{making.dataset.prefix}: data.sample_format {self.name} draws the random next segment from another "
                "document, but there is only 1; separate the documents (one per line or blank-line delimited), or use "
                "full_sentences"
            )
        settings = PairSettings(
            room=self.room(making),
            specials=self.section.special_tokens(making.template.double_separator),
            short_seq_prob=making.settings.own.get("short_seq_prob", 0.0),
            random_next_prob=making.settings.own.get("random_next_prob", RANDOM_NEXT),
            key=stream_key(making.settings.seed, self.name),
            duplicate=duplicate,
            by_sentences="random_next_weights" in making.settings.own,
            exchanges=self.exchanges,
        )
        make = partial(make_pairs, load_object(self.chooser), table, settings)
        return in_order(make, document_ranges(table.bounds), making.workers)


class SegmentPair(PairFormat):
    """SEGMENT-PAIR + NSP of BERT."""

    section: ClassVar[type[SegmentsSection]] = SegmentPairSection

    def own_settings(self, data: DataSection) -> dict[str, Any]:
        # Part of the key of an index only if it is not BERT's, which every index had before it was a setting.
        random_next = getattr(data, "random_next_prob", RANDOM_NEXT)
        others: dict[str, Any] = {"random_next_prob": random_next} if random_next != RANDOM_NEXT else {}
        if getattr(data, "random_next_weights", "documents") == "sentences":
            others["random_next_weights"] = "sentences"
        return {"short_seq_prob": data.short_seq_prob} | others  # type: ignore[attr-defined]


class SentenceOrder(SegmentPair):
    """The segment pairs of ALBERT's sentence-order prediction."""

    section = SentenceOrderSection
    sequence_label = "sentence_order"
    sequence_labels = ("A precedes B", "A and B are exchanged, or B is from another document")
    exchanges = True


class SentencePair(PairFormat):
    """SENTENCE-PAIR + NSP."""

    section = SentencePairSection
    chooser = "ctxlm_ds.data.formats.loops.pairs:choose_sentence_pairs"

    def joins_sentences(self, data: DataSection) -> bool:
        return False


class DocSegmentsSection(PairSection):
    """Rows of sentences of one document, most of them divided into two segments (ELECTRA)."""

    fixed: ClassVar[tuple[str, ...]] = (*PairSection.fixed, *DIVIDED_SETTINGS)

    sample_format: str = "doc_segments"
    short_seq_prob: Probability = 0.05
    """Share of rows whose target length is drawn shorter (ELECTRA 0.05)."""
    one_segment_prob: Probability = 0.1
    """Share of rows that are not divided (ELECTRA 0.1)."""


class DocSegments(RowFormat):
    """The rows of ELECTRA: sentences of one document until they reach the row's length, then cut to it."""

    section = DocSegmentsSection
    makes_pairs = True
    framing = "ctxlm_ds.data.formats.loops.pairs:frame_segments"
    looks_up_sentences = True

    def own_settings(self, data: DataSection) -> dict[str, Any]:
        return {name: getattr(data, name) for name in DIVIDED_SETTINGS}

    def records(self, table: SentenceTable, making: Making, duplicate: int) -> Iterator[Records]:
        from ctxlm_ds.data.formats.loops.pairs import SegmentSettings, make_rows
        from ctxlm_ds.data.index.sentence_table import document_ranges, in_order
        from ctxlm_ds.data.numba_random import stream_key

        self.room(making)
        self.require_sentences(making, table.is_split)
        settings = SegmentSettings(
            seq_length=making.settings.seq_length,
            specials=self.section.special_tokens(making.template.double_separator),
            key=stream_key(making.settings.seed, self.name),
            duplicate=duplicate,
            **making.settings.own,
        )
        return in_order(partial(make_rows, table, settings), document_ranges(table.bounds), making.workers)

    def second_starts(self, records: Records, numbers: Numbers, lengths: Numbers) -> Numbers:
        return records["b_start"][numbers] + 2


class GivenPairsSection(PairSection):
    """Rows of the two texts of a record, the longer one cut first (ctxlm preprocess --join-keys)."""

    by_sentence: ClassVar[bool] = False

    sample_format: str = "given_pairs"


class GivenPairs(TwoSegments):
    """Given pairs: every document of the dataset has two sequences."""

    section = GivenPairsSection

    def records(self, table: SentenceTable, making: Making, duplicate: int) -> Iterator[Records]:
        import numpy as np

        from ctxlm_ds.data.index.record import RECORDS_AT_ONCE, SAMPLE_DTYPE

        sizes = np.diff(table.bounds)
        wrong = np.flatnonzero(sizes != SEGMENTS)
        if len(wrong):
            raise DataError(
                f"{making.dataset.prefix}: data.sample_format {self.name} needs documents of {SEGMENTS} texts, but one "
                f"has {int(sizes[wrong[0]])}; preprocess it with --json-keys A B --join-keys"
            )
        room, specials = self.room(making), self.section.special_tokens(making.template.double_separator)
        places = np.append(table.offsets["value"] >> table.shift, table.stop)
        starts = places[:-1].reshape(-1, SEGMENTS)
        document_ends = table.document_ends if len(table.document_ends) else places[SEGMENTS::SEGMENTS] - table.eod
        kept = longest_first(np.stack([starts[:, 1], document_ends], axis=1) - starts, room)
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
        from ctxlm_ds.data.sample import NO_LABEL

        write = super().reader(dataset, template)

        def fill(samples: Samples, slots: Numbers, records: Records, numbers: Numbers) -> int:
            place = write(samples, slots, records, numbers)
            samples.sequence_labels[slots] = NO_LABEL
            return place

        return fill


def longest_first(lengths: Numbers, room: int) -> Numbers:
    """Return how many tokens of each text remain if the longer one is cut until both fit.

    If both are longer than half of the room, each gets half of it, and the longer one, or of equals the second, an odd
    token (`longest_first` of tokenizers, which transformers' fast tokenizers call). `lengths` are [n, 2].
    """
    import numpy as np

    shorter, longer = lengths.min(axis=1), lengths.max(axis=1)
    half = room // 2
    short = np.where(shorter + longer > room, np.minimum(shorter, half), shorter)
    long = np.minimum(longer, room - short)
    second_is_longer = lengths[:, 1] >= lengths[:, 0]
    return np.stack([np.where(second_is_longer, short, long), np.where(second_is_longer, long, short)], axis=1)
