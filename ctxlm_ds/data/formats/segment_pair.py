"""BERT's segment pairs: A and B of one document, or B from another one."""

from __future__ import annotations

from typing import ClassVar

from ctxlm_ds.data.formats.base import PairSection, SampleFormat
from ctxlm_ds.recipe.section import Probability


class SegmentPairSection(PairSection):
    """Rows of two segments of several sentences each (BERT)."""

    fixed: ClassVar[tuple[str, ...]] = (*PairSection.fixed, "short_seq_prob")

    sample_format: str = "segment_pair"
    short_seq_prob: Probability = 0.1
    """Share of documents whose target length is drawn shorter (BERT 0.1)."""


class SegmentPair(SampleFormat):
    """SEGMENT-PAIR + NSP of BERT (loops/segment_pair.py)."""

    name = "segment_pair"
    section = SegmentPairSection
    makes_pairs = True
