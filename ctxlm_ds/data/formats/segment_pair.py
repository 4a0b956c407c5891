"""BERT's segment pairs: A and B of one document, or B from another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ctxlm_ds.data.formats.base import PairFormat, PairSection
from ctxlm_ds.recipe.section import Probability
from ctxlm_ds.recipe.sections import DataSection


class SegmentPairSection(PairSection):
    """Rows of two segments of several sentences each (BERT)."""

    fixed: ClassVar[tuple[str, ...]] = (*PairSection.fixed, "short_seq_prob")

    sample_format: str = "segment_pair"
    short_seq_prob: Probability = 0.1
    """Share of documents whose target length is drawn shorter (BERT 0.1)."""


class SegmentPair(PairFormat):
    """SEGMENT-PAIR + NSP of BERT (loops/segment_pair.py)."""

    name = "segment_pair"
    section = SegmentPairSection

    def own_settings(self, data: DataSection) -> dict[str, Any]:
        return {"short_seq_prob": data.short_seq_prob}  # type: ignore[attr-defined]

    def chooser(self) -> Callable[..., tuple[int, int]]:
        from ctxlm_ds.data.formats.loops.segment_pair import choose_segment_pairs

        return choose_segment_pairs
