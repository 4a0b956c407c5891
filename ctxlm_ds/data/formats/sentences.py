"""Full sentences, across documents or within one (FULL-SENTENCES and DOC-SENTENCES of Liu 2019, section 4.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from ctxlm_ds.data.formats.base import Making, RowFormat, RowSection
from ctxlm_ds.recipe.sections import DataSection

if TYPE_CHECKING:
    from ctxlm_ds.data.formats.base import Records
    from ctxlm_ds.data.index.sentence_table import SentenceTable

SETTING = "separate_sentences"


class SentencesSection(RowSection):
    """Rows of full sentences."""

    # Not in `fixed`: a run that is older than this setting could not resume. The key of the sample index covers it.
    separate_sentences: bool = True
    """End every sentence with the separator, and every document with one more (fairseq); false: separators between
    documents only, so that rows hold more text."""

    @property
    def may_lack_end(self) -> bool:
        """A sentence longer than a row is cut at the end of the row."""
        return self.separate_sentences


class FullSentencesSection(SentencesSection):
    """Rows of sentences one after another, across documents (RoBERTa's FULL-SENTENCES)."""

    sample_format: str = "full_sentences"


class DocSentencesSection(SentencesSection):
    """Rows of sentences of one document (RoBERTa's DOC-SENTENCES)."""

    sample_format: str = "doc_sentences"


class FullSentences(RowFormat):
    """FULL-SENTENCES (fairseq's break mode `complete`): a row continues after a document's end."""

    name = "full_sentences"
    section: ClassVar[type[SentencesSection]] = FullSentencesSection
    framing = "ctxlm_ds.data.formats.loops.framing:frame_sentences"
    looks_up_sentences = True

    def own_settings(self, data: DataSection) -> dict[str, Any]:
        # Indexes of dense rows keep the key that they had before there was a setting.
        return {SETTING: True} if data.separate_sentences else {}  # type: ignore[attr-defined]

    def joins_sentences(self, data: DataSection) -> bool:
        return not data.separate_sentences  # type: ignore[attr-defined]

    def records(self, table: SentenceTable, making: Making, duplicate: int) -> Iterator[Records]:
        from ctxlm_ds.data.formats.loops.sentences import sentence_rows

        return sentence_rows(table, self.room(making), True, SETTING in making.settings.own, (0, table.num_documents))


class DocSentences(FullSentences):
    """DOC-SENTENCES (fairseq's break mode `complete_doc`): a document's end ends the row.

    The last row of each document is shorter. The paper enlarges the batch to compensate; packing combines short rows.
    """

    name = "doc_sentences"
    section = DocSentencesSection

    def records(self, table: SentenceTable, making: Making, duplicate: int) -> Iterator[Records]:
        import numpy as np

        from ctxlm_ds.data.formats.loops.sentences import sentence_rows
        from ctxlm_ds.data.index.sentence_table import document_ranges, in_order

        room, separated = self.room(making), SETTING in making.settings.own

        def rows_of(documents: tuple[int, int]) -> Records:
            return np.concatenate(list(sentence_rows(table, room, False, separated, documents)))

        return in_order(rows_of, document_ranges(table.bounds), making.workers)
