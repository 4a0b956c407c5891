"""Full sentences that may cross documents (Liu 2019, section 4.2)."""

from __future__ import annotations

from ctxlm_ds.data.formats.base import RowSection, SampleFormat


class FullSentencesSection(RowSection):
    """Rows of sentences one after another, across documents (RoBERTa's FULL-SENTENCES)."""

    sample_format: str = "full_sentences"


class FullSentences(SampleFormat):
    """FULL-SENTENCES (loops/full_sentences.py)."""

    name = "full_sentences"
    section = FullSentencesSection
