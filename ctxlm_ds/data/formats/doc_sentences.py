"""Full sentences of one document (Liu 2019, section 4.2)."""

from __future__ import annotations

from ctxlm_ds.data.formats.base import RowSection, SampleFormat


class DocSentencesSection(RowSection):
    """Rows of sentences of one document (RoBERTa's DOC-SENTENCES)."""

    sample_format: str = "doc_sentences"


class DocSentences(SampleFormat):
    """DOC-SENTENCES (loops/full_sentences.py)."""

    name = "doc_sentences"
    section = DocSentencesSection
