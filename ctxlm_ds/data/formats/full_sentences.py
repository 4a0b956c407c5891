"""Full sentences that may cross documents (Liu 2019, section 4.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ctxlm_ds.data.formats.base import Making, RowFormat, RowSection

if TYPE_CHECKING:
    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.data.formats.base import Numbers, Records
    from ctxlm_ds.data.formats.loops.template import SequenceTemplate
    from ctxlm_ds.data.index.sentence_table import SentenceTable


class FullSentencesSection(RowSection):
    """Rows of sentences one after another, across documents (RoBERTa's FULL-SENTENCES)."""

    sample_format: str = "full_sentences"


class FullSentences(RowFormat):
    """FULL-SENTENCES (loops/full_sentences.py)."""

    name = "full_sentences"
    section = FullSentencesSection

    def records(self, table: SentenceTable, making: Making, duplicate: int) -> Iterator[Records]:
        from ctxlm_ds.data.formats.loops.full_sentences import sentence_blocks

        return sentence_blocks(table, self.room(making), True, (0, table.num_documents))

    def texts(self, dataset: IndexedDataset, template: SequenceTemplate) -> tuple[Numbers, Numbers]:
        from ctxlm_ds.data.index.sentence_table import document_token_bounds

        return document_token_bounds(dataset, template.sep_id)
