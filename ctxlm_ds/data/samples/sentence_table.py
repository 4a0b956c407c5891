"""The sentences of an indexed dataset as token ranges, documents grouped, end-of-document tokens taken off.

In: IndexedDataset. Out: SentenceTable. A dataset built with --append-eod ends each document with one token that is not
text: it is left out here, and the sample formats put their own separators, so that it is never doubled, never masked.
Empty sentences and documents vanish. A dataset without --split-sentences has one sequence a document: `is_split` is
False.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.errors import DataError

if TYPE_CHECKING:
    from ctxlm_ds.data.indexed import IndexedDataset

DOCUMENTS_LOOKED_AT = 64


@dataclass(frozen=True)
class SentenceTable:
    """N sentences of D documents, none of them empty."""

    starts: NDArray[np.int64]
    """[N] first token of each sentence in the flat token stream."""
    ends: NDArray[np.int64]
    """[N] token after its last."""
    documents: NDArray[np.int64]
    """[D + 1] index of each document's first sentence, then N."""
    is_split: bool
    """Sequences are sentences, not whole documents."""

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    @property
    def num_sentences(self) -> int:
        return len(self.starts)


def sentence_table(dataset: IndexedDataset, sep_id: int) -> SentenceTable:
    """Read a dataset's sentences (16 bytes of memory a sentence).

    Raises:
        DataError: the dataset holds no text.
    """
    starts = dataset.sequence_starts[:-1]
    ends = dataset.sequence_starts[1:].copy()
    bounds = dataset.document_indices
    if ends_with_eod(dataset, sep_id):
        last_sequences = bounds[1:][bounds[1:] > bounds[:-1]] - 1
        ends[last_sequences] -= 1
    kept = ends > starts
    if not kept.any():
        raise DataError(
            f"{dataset.prefix}: no text ({dataset.num_documents} documents, all empty); check what was preprocessed"
        )
    documents = np.unique(np.concatenate([[0], np.cumsum(kept)])[bounds])
    return SentenceTable(starts[kept], ends[kept], documents.astype(np.int64), is_split(dataset))


def is_split(dataset: IndexedDataset) -> bool:
    """Whether sequences are sentences: as recorded, else whether any document has more than one."""
    if dataset.metadata is not None:
        return bool(dataset.metadata["split_sentences"])
    return dataset.num_sequences > dataset.num_documents


def ends_with_eod(dataset: IndexedDataset, sep_id: int) -> bool:
    """Whether each document ends with an end-of-document token.

    Recorded beside our own datasets. Megatron's carry no record: theirs do when up to 64 documents spread over the
    dataset all end with the separator, which is what its BERT tokenizers append.
    """
    if dataset.metadata is not None:
        return bool(dataset.metadata["append_eod"])
    bounds = dataset.document_indices
    last_sequences = bounds[1:][bounds[1:] > bounds[:-1]] - 1
    if len(last_sequences) == 0:
        return False
    spread = np.unique(np.linspace(0, len(last_sequences) - 1, DOCUMENTS_LOOKED_AT).astype(np.int64))
    last_tokens = dataset.tokens[dataset.sequence_starts[last_sequences[spread] + 1] - 1]
    return bool((last_tokens == sep_id).all())


def document_token_bounds(dataset: IndexedDataset, sep_id: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[D] first token of each document and [D] the token after its last, end-of-document tokens left out."""
    bounds = dataset.sequence_starts[dataset.document_indices]
    starts, ends = bounds[:-1], bounds[1:]
    present = ends > starts
    starts, ends = starts[present], ends[present]
    if ends_with_eod(dataset, sep_id):
        ends = ends - 1
    filled = ends > starts
    return starts[filled], ends[filled]


def require_pairs_possible(table: SentenceTable, prefix: object, sample_format: str) -> None:
    """Refuse datasets from which no sentence pair can be drawn.

    Raises:
        DataError: the dataset is not split into sentences, or has a single document.
    """
    if not table.is_split:
        raise DataError(
            f"{prefix}: data.sample_format {sample_format} needs sentences, but each sequence of this dataset is a "
            "whole document; preprocess it again with --split-sentences, or use full_sentences or doc_sentences"
        )
    if table.num_documents < 2:
        raise DataError(
            f"{prefix}: data.sample_format {sample_format} draws the random next segment from another document, but "
            "there is only 1; separate the documents (one a line or blank-line delimited), or use full_sentences"
        )
