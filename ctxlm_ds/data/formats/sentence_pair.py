"""Pairs of single sentences (Liu 2019, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable

from ctxlm_ds.data.formats.base import PairFormat, PairSection


class SentencePairSection(PairSection):
    """Rows of two single sentences (RoBERTa's SENTENCE-PAIR + NSP)."""

    sample_format: str = "sentence_pair"


class SentencePair(PairFormat):
    """SENTENCE-PAIR + NSP (loops/sentence_pair.py)."""

    name = "sentence_pair"
    section = SentencePairSection

    def chooser(self) -> Callable[..., tuple[int, int]]:
        from ctxlm_ds.data.formats.loops.sentence_pair import choose_sentence_pairs

        return choose_sentence_pairs
