"""Documents one after another, cut into blocks of full rows (GPT) or into chunks without special tokens (T5)."""

from __future__ import annotations

from typing import ClassVar

from ctxlm_ds.data.formats.base import MadeSamples, Making, SampleFormat
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.sections import DataSection, SmallInt


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
    """Blocks as Megatron's GPTDataset cuts them (loops/blocks.py)."""

    name = "blocks"
    section = BlocksSection
    shifted = True
    forms_rows = True
    framing = "ctxlm_ds.data.formats.loops.framing:copy_blocks"

    def make(self, making: Making) -> MadeSamples:
        from ctxlm_ds.data.formats.loops.blocks import block_pieces, text_bounds

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

    name = "chunks"
    section = ChunksSection
    framing = "ctxlm_ds.data.formats.loops.framing:copy_blocks"

    def make(self, making: Making) -> MadeSamples:
        from ctxlm_ds.data.index.record import even_records

        first, after = making.tokens
        if first == after:
            raise DataError(f"{making.dataset.prefix}: no text; check what was preprocessed")
        return MadeSamples.of_all(making, even_records(first, after, making.settings.seq_length))
