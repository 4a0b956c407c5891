"""From a line of the sample index to a Sample: the tokens, framed.

In: records, the dataset they point into. Out: Sample. Used for training and while the index is still being built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.config.schema import PAIR_FORMATS
from ctxlm_ds.data.sample import Sample
from ctxlm_ds.data.samples.blocks import block_sample
from ctxlm_ds.data.samples.sentence_table import document_token_bounds
from ctxlm_ds.data.samples.template import SequenceTemplate

if TYPE_CHECKING:
    from ctxlm_ds.data.indexed import IndexedDataset


class SampleReader:
    """Samples by number."""

    def __init__(
        self, records: NDArray[Any], dataset: IndexedDataset, template: SequenceTemplate, sample_format: str
    ) -> None:
        self.records = records
        self.template = template
        self.is_pair = sample_format in PAIR_FORMATS
        self._tokens = np.asarray(dataset.tokens)
        self._is_block = sample_format == "blocks"
        self._crosses_documents = sample_format == "full_sentences"
        if self._crosses_documents:
            self._document_starts, self._document_ends = document_token_bounds(dataset, template.sep_id)

    def sample(self, number: int) -> Sample:
        """Sample `number` before corruption."""
        a_start, a_end, b_start, b_end, _, is_random = self.records[number].item()
        if self.is_pair:
            return self.template.pair(self._tokens[a_start:a_end], self._tokens[b_start:b_end], is_random)
        if self._is_block:
            return block_sample(self._tokens[a_start:a_end])
        if not self._crosses_documents:
            return self.template.single([self._tokens[a_start:a_end]])
        return self.template.single(self._pieces_by_document(a_start, a_end))

    def second_start(self, number: int) -> int:
        """Position from which token types are 1 (the sample's length where there is no B)."""
        record = self.records[number]
        return int(record["a_end"] - record["a_start"]) + 2 if self.is_pair else int(record["num_tokens"])

    def _pieces_by_document(self, start: int, end: int) -> list[NDArray[Any]]:
        starts, ends = self._document_starts, self._document_ends
        document = int(starts.searchsorted(start, side="right")) - 1
        pieces = []
        while document < len(starts) and starts[document] < end:
            pieces.append(self._tokens[max(start, starts[document]) : min(end, ends[document])])
            document += 1
        return pieces
