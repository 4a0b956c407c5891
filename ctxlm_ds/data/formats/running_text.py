"""Rows of running text: blocks of full rows (GPT), chunks without special tokens (T5), and full sentences.

Full sentences are read across documents or within one (FULL-SENTENCES and DOC-SENTENCES of Liu 2019, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from ctxlm_ds.data.formats.base import MadeSamples, Making, RowFormat, RowSection, SampleFormat
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.sections import DataSection, SmallInt

if TYPE_CHECKING:
    from ctxlm_ds.data.formats.base import Records
    from ctxlm_ds.data.index.sentence_table import SentenceTable

SETTING = "separate_sentences"


class BlocksSection(DataSection):
    """Documents one after another, cut into full rows (a dataset made with --append-eod)."""

    fixed: ClassVar[tuple[str, ...]] = (*DataSection.fixed, "reset_at_documents", "max_sequences_per_row")
    ends_documents: ClassVar[bool] = True

    sample_format: str = "blocks"
    max_sequences_per_row: SmallInt = 8
    """Most documents in one row."""
    reset_at_documents: bool = True
    """Documents of a row never see each other and their positions restart; false: a row is one sequence, its
    documents separated only by the end-of-document token (GPT-2; Megatron's default)."""

    @property
    def shares_rows(self) -> bool:
        return self.reset_at_documents


class Blocks(SampleFormat):
    """Blocks as Megatron's GPTDataset cuts them (loops/running_text.py)."""

    section = BlocksSection
    shifted = True
    forms_rows = True
    framing = "ctxlm_ds.data.formats.loops.framing:copy_blocks"

    def make(self, making: Making) -> MadeSamples:
        from ctxlm_ds.data.formats.loops.running_text import block_pieces, text_bounds

        dataset, settings = making.dataset, making.settings
        bounds, num_documents = text_bounds(dataset, making.template.sep_id, settings.packing, making.documents)
        first, after = making.sentences
        pieces = block_pieces(bounds, settings.seq_length, settings.max_sequences_per_row)
        return MadeSamples(num_documents, after - first, pieces)


class ChunksSection(DataSection):
    """Documents one after another, cut into chunks of one size without special tokens (T5)."""

    sample_format: str = "chunks"


class Chunks(SampleFormat):
    """Chunks as T5's `reduce_concat_tokens` and `split_tokens` cut them; only a dataset's last one is shorter."""

    section = ChunksSection
    framing = "ctxlm_ds.data.formats.loops.framing:copy_blocks"

    def make(self, making: Making) -> MadeSamples:
        from ctxlm_ds.data.index.record import even_records

        first, after = making.dataset.token_range(making.documents)
        if first == after:
            raise DataError(f"{making.dataset.prefix}: no text; check what was preprocessed")
        return MadeSamples.of_all(making, even_records(first, after, making.settings.seq_length))


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

    section: ClassVar[type[SentencesSection]] = FullSentencesSection
    framing = "ctxlm_ds.data.formats.loops.framing:frame_sentences"
    looks_up_sentences = True

    def own_settings(self, data: DataSection) -> dict[str, Any]:
        # Indexes of dense rows keep the key that they had before there was a setting.
        return {SETTING: True} if data.separate_sentences else {}  # type: ignore[attr-defined]

    def joins_sentences(self, data: DataSection) -> bool:
        return not data.separate_sentences  # type: ignore[attr-defined]

    def records(self, table: SentenceTable, making: Making, duplicate: int) -> Iterator[Records]:
        from ctxlm_ds.data.formats.loops.running_text import sentence_rows

        return sentence_rows(table, self.room(making), True, SETTING in making.settings.own, (0, table.num_documents))


class DocSentences(FullSentences):
    """DOC-SENTENCES (fairseq's break mode `complete_doc`): a document's end ends the row.

    The last row of each document is shorter. The paper enlarges the batch to compensate; packing combines short rows.
    """

    section = DocSentencesSection

    def records(self, table: SentenceTable, making: Making, duplicate: int) -> Iterator[Records]:
        import numpy as np

        from ctxlm_ds.data.formats.loops.running_text import sentence_rows
        from ctxlm_ds.data.index.sentence_table import document_ranges, in_order

        room, separated = self.room(making), SETTING in making.settings.own

        def rows_of(documents: tuple[int, int]) -> Records:
            return np.concatenate(list(sentence_rows(table, room, False, separated, documents)))

        return in_order(rows_of, document_ranges(table.bounds), making.workers)
