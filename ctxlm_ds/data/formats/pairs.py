"""Pairs of segments with a label: BERT's segment pairs, ALBERT's ordered ones, pairs of single sentences (Liu 2019)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ctxlm_ds.data.formats.base import Making, RowFormat, RowSection, SequenceTemplate
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.sections import DataSection, Probability
from ctxlm_ds.registry import load_object

if TYPE_CHECKING:
    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.data.formats.base import Fill, Numbers, Records
    from ctxlm_ds.data.index.sentence_table import SentenceTable

RANDOM_NEXT = 0.5
"""BERT's share of random next segments."""


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

    fixed: ClassVar[tuple[str, ...]] = (*SegmentsSection.fixed, "random_next_prob")

    sample_format: str = "segment_pair"
    random_next_prob: Probability = RANDOM_NEXT
    """Share of pairs whose second segment is of another document although theirs continues (BERT 0.5). A document's
    last sentence alone always has one."""


class SentencePairSection(PairSection):
    """Rows of two single sentences (RoBERTa's SENTENCE-PAIR + NSP)."""

    sample_format: str = "sentence_pair"


class PairFormat(RowFormat):
    """A format of PairSection: two segments, the second one of the same document or of another."""

    makes_pairs = True
    sequence_label: ClassVar[str | None] = "next_sentence"
    sequence_labels = ("B follows A", "B is from another document")
    chooser: ClassVar[str]
    """`module:function` of the compiled loop that chooses the pairs of a range of documents."""

    def records(self, table: SentenceTable, making: Making, duplicate: int) -> Iterator[Records]:
        from ctxlm_ds.data.formats.loops.pairs import PairSettings, make_pairs
        from ctxlm_ds.data.formats.loops.ranges import document_ranges, in_order
        from ctxlm_ds.data.numba_random import stream_key

        name = f"{making.dataset.prefix}: data.sample_format {self.name}"
        if not table.is_split:
            raise DataError(
                f"{name} needs sentences, but each sequence of this dataset is a document; preprocess it again with "
                "--split-sentences, or use full_sentences or doc_sentences"
            )
        if table.num_documents < 2:
            raise DataError(
                f"{name} draws the random next segment from another document, but there is only 1; separate the "
                "documents (one per line or blank-line delimited), or use full_sentences"
            )
        settings = PairSettings(
            room=self.room(making),
            specials=self.section.special_tokens(making.template.double_separator),
            short_seq_prob=making.settings.own.get("short_seq_prob", 0.0),
            random_next_prob=making.settings.own.get("random_next_prob", RANDOM_NEXT),
            key=stream_key(making.settings.seed, self.name),
            duplicate=duplicate,
        )
        make = partial(make_pairs, load_object(self.chooser), table, settings)
        return in_order(make, document_ranges(table.documents), making.workers)

    def reader(self, dataset: IndexedDataset, template: SequenceTemplate) -> Fill:
        import numpy as np

        from ctxlm_ds.data.formats.loops.framing import frame_pairs

        return partial(frame_pairs, np.asarray(dataset.tokens), template)

    def second_starts(self, records: Records, numbers: Numbers, lengths: Numbers) -> Numbers:
        return records["a_end"][numbers] - records["a_start"][numbers] + 2


class SegmentPair(PairFormat):
    """SEGMENT-PAIR + NSP of BERT."""

    name = "segment_pair"
    section: ClassVar[type[SegmentsSection]] = SegmentPairSection
    chooser = "ctxlm_ds.data.formats.loops.pairs:choose_segment_pairs"

    def own_settings(self, data: DataSection) -> dict[str, Any]:
        # Part of the key of an index only if it is not BERT's, which every index had before it was a setting.
        random_next = getattr(data, "random_next_prob", RANDOM_NEXT)
        others = {"random_next_prob": random_next} if random_next != RANDOM_NEXT else {}
        return {"short_seq_prob": data.short_seq_prob} | others  # type: ignore[attr-defined]


class SentenceOrder(SegmentPair):
    """The segment pairs of ALBERT's sentence-order prediction."""

    name = "sentence_order"
    section = SentenceOrderSection
    sequence_label = "sentence_order"
    sequence_labels = ("A precedes B", "A and B are exchanged, or B is from another document")

    chooser = "ctxlm_ds.data.formats.loops.pairs:choose_ordered_segments"


class SentencePair(PairFormat):
    """SENTENCE-PAIR + NSP."""

    name = "sentence_pair"
    section = SentencePairSection
    chooser = "ctxlm_ds.data.formats.loops.pairs:choose_sentence_pairs"

    def joins_sentences(self, data: DataSection) -> bool:
        return False
