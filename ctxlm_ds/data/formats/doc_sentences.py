"""Full sentences of one document (Liu 2019, section 4.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ctxlm_ds.data.formats.base import Making, RowFormat, RowSection

if TYPE_CHECKING:
    from ctxlm_ds.data.formats.base import Records
    from ctxlm_ds.data.index.sentence_table import SentenceTable


class DocSentencesSection(RowSection):
    """Rows of sentences of one document (RoBERTa's DOC-SENTENCES)."""

    sample_format: str = "doc_sentences"


class DocSentences(RowFormat):
    """DOC-SENTENCES (fairseq's `complete_doc`): as FULL-SENTENCES, but a document's end ends the block.

    So the last block of each document is shorter. The paper enlarges the batch to make up for it; packing puts several
    short blocks into one row instead.
    """

    name = "doc_sentences"
    section = DocSentencesSection

    def records(self, table: SentenceTable, making: Making, duplicate: int) -> Iterator[Records]:
        import numpy as np

        from ctxlm_ds.data.formats.loops.full_sentences import sentence_blocks
        from ctxlm_ds.data.formats.loops.ranges import document_ranges, in_order
        from ctxlm_ds.data.index.record import SAMPLE_DTYPE

        room = self.room(making)

        def of_range(documents: tuple[int, int]) -> Records:
            return np.concatenate([np.empty(0, dtype=SAMPLE_DTYPE), *sentence_blocks(table, room, False, documents)])

        return in_order(of_range, document_ranges(table.documents), making.workers)
