"""Rows of one document as one segment or two (Clark 2020; google-research/electra build_pretraining_dataset.py)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ctxlm_ds.data.formats.base import Making, RowFormat
from ctxlm_ds.data.formats.pairs import PairSection
from ctxlm_ds.recipe.sections import DataSection, Probability

if TYPE_CHECKING:
    from ctxlm_ds.data.formats.base import Numbers, Records
    from ctxlm_ds.data.index.sentence_table import SentenceTable

SETTINGS = ("short_seq_prob", "one_segment_prob")


class DocSegmentsSection(PairSection):
    """Rows of sentences of one document, most of them divided into two segments (ELECTRA)."""

    fixed: ClassVar[tuple[str, ...]] = (*PairSection.fixed, *SETTINGS)

    sample_format: str = "doc_segments"
    short_seq_prob: Probability = 0.05
    """Share of rows whose target length is drawn shorter (ELECTRA 0.05)."""
    one_segment_prob: Probability = 0.1
    """Share of rows that are not divided (ELECTRA 0.1)."""


class DocSegments(RowFormat):
    """The rows of ELECTRA: sentences of one document until they reach the row's length, then cut to it."""

    name = "doc_segments"
    section = DocSegmentsSection
    makes_pairs = True
    framing = "ctxlm_ds.data.formats.loops.segments:frame_segments"
    looks_up_sentences = True

    def own_settings(self, data: DataSection) -> dict[str, Any]:
        return {name: getattr(data, name) for name in SETTINGS}

    def records(self, table: SentenceTable, making: Making, duplicate: int) -> Iterator[Records]:
        from ctxlm_ds.data.formats.loops.ranges import document_ranges, in_order
        from ctxlm_ds.data.formats.loops.segments import SegmentSettings, make_rows
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
