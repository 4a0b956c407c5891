"""Pairs of single sentences (Liu 2019, section 4.2)."""

from __future__ import annotations

from ctxlm_ds.data.formats.base import PairSection, SampleFormat


class SentencePairSection(PairSection):
    """Rows of two single sentences (RoBERTa's SENTENCE-PAIR + NSP)."""

    sample_format: str = "sentence_pair"


class SentencePair(SampleFormat):
    """SENTENCE-PAIR + NSP (loops/sentence_pair.py)."""

    name = "sentence_pair"
    section = SentencePairSection
    makes_pairs = True
