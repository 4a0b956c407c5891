"""The sentences of an indexed dataset as token ranges, documents grouped, end-of-document tokens taken off.

In: IndexedDataset. Out: SentenceTable. A dataset built with --append-eod ends each document with one token that is not
text: it is left out here, and the sample formats put their own separators, so that it is never doubled, never masked.
Empty sentences and documents vanish. A dataset without --split-sentences has one sequence a document: `is_split` is
False.

Sentences lie one after another in the token stream, so where each begins is all there is to know of them, and that
stands in the mapped .idx: a table takes 16 bytes of memory a document, and 8 a sentence only where empty sequences must
be left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.numba_random import compiled, inlined
from ctxlm_ds.errors import DataError

if TYPE_CHECKING:
    from ctxlm_ds.data.dataset.reader import IndexedDataset

DOCUMENTS_LOOKED_AT = 64
UNALIGNED = np.dtype([("value", "<i8")])
"""An int64 at any address: the arrays of an .idx are unaligned, which compiled code must know."""


class SentenceTable(NamedTuple):
    """N sentences of D documents, none of them empty; compiled code takes it as it is."""

    offsets: NDArray[Any]
    """[N] UNALIGNED, where each sentence begins, in units of 2^-shift tokens."""
    shift: int
    documents: NDArray[np.int64]
    """[D + 1] index of each document's first sentence, then N."""
    document_ends: NDArray[np.int64]
    """[D] the token after each document's last."""
    is_split: bool
    """Sequences are sentences, not whole documents."""

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    @property
    def num_sentences(self) -> int:
        return len(self.offsets)

    @property
    def starts(self) -> NDArray[np.int64]:
        """[N] first token of each sentence in the flat token stream (a copy)."""
        starts: NDArray[np.int64] = self.offsets["value"] >> self.shift
        return starts

    @property
    def ends(self) -> NDArray[np.int64]:
        """[N] token after its last (a copy)."""
        ends = np.append(self.starts[1:], 0)
        ends[self.documents[1:] - 1] = self.document_ends
        return ends


@inlined
def start_of(table: SentenceTable, sentence: int) -> int:
    """First token of a sentence."""
    return table.offsets[sentence].value >> table.shift


@inlined
def end_of(table: SentenceTable, sentence: int, document: int) -> int:
    """Token after the last of a sentence of a document."""
    if sentence + 1 == table.documents[document + 1]:
        return table.document_ends[document]
    return table.offsets[sentence + 1].value >> table.shift


@inlined
def reaching(table: SentenceTable, sentence: int, document: int, limit: int) -> int:
    """The first sentence of a document, from `sentence` on, that ends at token `limit` or later, or its last one."""
    last = table.documents[document + 1] - 1
    limit <<= table.shift
    while sentence < last and table.offsets[sentence + 1].value < limit:
        sentence += 1
    return sentence


def sentence_table(dataset: IndexedDataset, sep_id: int, documents: tuple[int, int] | None = None) -> SentenceTable:
    """Read the sentences of a dataset, or of its documents [first, after the last).

    Raises:
        DataError: the dataset holds no text.
    """
    first, after = documents or (0, dataset.num_documents)
    bounds = np.array(dataset.arrays.documents[first : after + 1], dtype=np.int64)
    begin, end = int(bounds[0]), int(bounds[-1])
    offsets, unit = token_offsets(dataset)
    starts = offsets[begin:end]
    stop = int(offsets[end]["value"]) // unit if end < dataset.num_sequences else dataset.num_tokens
    eod = int(ends_with_eod(dataset, sep_id))
    shift, bounds = unit.bit_length() - 1, bounds - begin
    kept_sentences, kept_documents = _count_filled(starts, shift, bounds, stop, eod)
    if kept_sentences == 0:
        raise DataError(
            f"{dataset.prefix}: no text ({after - first} documents, all empty); check what was preprocessed"
        )
    document_ends = np.empty(kept_documents, dtype=np.int64)
    if kept_sentences == len(starts) and kept_documents == len(bounds) - 1:
        _fill_document_ends(starts, shift, bounds, stop, eod, document_ends)
        return SentenceTable(starts, shift, bounds, document_ends, is_split(dataset))
    filled = np.empty(kept_sentences, dtype=UNALIGNED)
    filled_documents = np.empty(kept_documents + 1, dtype=np.int64)
    _take_filled((starts, shift, bounds, stop, eod), filled, filled_documents, document_ends)
    return SentenceTable(_read_only(filled), 0, filled_documents, document_ends, is_split(dataset))


def token_offsets(dataset: IndexedDataset) -> tuple[NDArray[Any], int]:
    """[N] UNALIGNED, where each sequence begins, and how much of it is one token (a power of two)."""
    return _read_only(dataset.arrays.offsets.view(UNALIGNED)), dataset.arrays.token_offset


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view that compiled code takes for the same type as a mapped file."""
    view = array.view()
    view.flags.writeable = False
    return view


@inlined
def _text_end(starts: Any, shift: int, bounds: Any, document: int, stop: int) -> int:
    """The token after a document's last, its end-of-document token counted."""
    after = bounds[document + 1]
    return starts[after].value >> shift if after < len(starts) else stop


@compiled
def _count_filled(starts: Any, shift: int, bounds: Any, stop: int, eod: int) -> tuple[int, int]:
    """Numbers of sentences and of documents that are not empty."""
    sentences = documents = 0
    for document in range(len(bounds) - 1):
        if bounds[document] == bounds[document + 1]:
            continue
        end = _text_end(starts, shift, bounds, document, stop) - eod
        before = sentences
        start = starts[bounds[document]].value >> shift
        for sentence in range(bounds[document] + 1, bounds[document + 1]):
            following = min(end, starts[sentence].value >> shift)
            sentences += following > start
            start = following
        sentences += end > start
        documents += sentences > before
    return sentences, documents


@compiled
def _fill_document_ends(starts: Any, shift: int, bounds: Any, stop: int, eod: int, document_ends: Any) -> None:
    for document in range(len(bounds) - 1):
        document_ends[document] = _text_end(starts, shift, bounds, document, stop) - eod


@compiled
def _take_filled(source: Any, filled: Any, filled_documents: Any, document_ends: Any) -> None:
    """Copy the places of the sentences and documents that are not empty."""
    starts, shift, bounds, stop, eod = source
    sentences = documents = 0
    for document in range(len(bounds) - 1):
        if bounds[document] == bounds[document + 1]:
            continue
        end = _text_end(starts, shift, bounds, document, stop) - eod
        before = sentences
        for sentence in range(bounds[document], bounds[document + 1]):
            start = starts[sentence].value >> shift
            following = starts[sentence + 1].value >> shift if sentence + 1 < bounds[document + 1] else end
            if min(end, following) > start:
                filled[sentences].value = start
                sentences += 1
        if sentences > before:
            filled_documents[documents] = before
            document_ends[documents] = end
            documents += 1
    filled_documents[documents] = sentences


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
    filled = np.flatnonzero(bounds[1:] > bounds[:-1])
    if len(filled) == 0:
        return False
    spread = np.unique(np.linspace(0, len(filled) - 1, DOCUMENTS_LOOKED_AT).astype(np.int64))
    last_tokens = dataset.tokens[starts_of(dataset, bounds[filled[spread] + 1]) - 1]
    return bool((last_tokens == sep_id).all())


def document_token_bounds(dataset: IndexedDataset, sep_id: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[D] first token of each document and [D] the token after its last, end-of-document tokens left out."""
    bounds = starts_of(dataset, dataset.document_indices)
    starts, ends = bounds[:-1], bounds[1:]
    present = ends > starts
    starts, ends = starts[present], ends[present]
    if ends_with_eod(dataset, sep_id):
        ends = ends - 1
    filled = ends > starts
    return starts[filled], ends[filled]


def starts_of(dataset: IndexedDataset, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
    """First token of each of `sequences`; for their number, the number of tokens."""
    offsets, unit = token_offsets(dataset)
    starts = np.full(len(sequences), dataset.num_tokens, dtype=np.int64)
    inside = sequences < dataset.num_sequences
    starts[inside] = offsets["value"][sequences[inside]] // unit
    return starts


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
