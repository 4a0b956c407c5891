"""The sentences of an indexed dataset as token ranges by document; end-of-document tokens are left out.

A dataset built with --append-eod ends each document with one token that is not text. It is left out here, and the
sample formats put separators, so that it is never doubled and never masked. Empty sentences and documents are left out.
A dataset without --split-sentences has one sequence per document: `is_split` is False.

Sentences are stored one after another in the token stream, and the mapped .idx says where each sentence and document
begins. So a table of a dataset takes memory only if sequences or documents are empty: 16 bytes per document, and 8 per
sentence if empty sequences must be left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.numba_random import compiled, inlined
from ctxlm_ds.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

DOCUMENTS_LOOKED_AT = 64
SENTENCES_PER_RANGE = 1 << 15
UNALIGNED = np.dtype([("value", "<i8")])
"""An int64 at any address: the arrays of an .idx are unaligned, which compiled code must know."""
_NOTHING: NDArray[np.int64] = np.empty(0, dtype=np.int64)


class SentenceTable(NamedTuple):
    """N sentences of D documents, none of them empty, in a form that compiled code reads."""

    offsets: NDArray[Any]
    """[N] UNALIGNED, where each sentence begins, in units of 2^-shift tokens."""
    shift: int
    documents: NDArray[Any]
    """[D + 1] UNALIGNED, first sentence of each document, then N."""
    document_ends: NDArray[np.int64]
    """[D] the token after each document's last; empty if the next document's beginning shows it."""
    stop: int
    """The token after the last, of an end-of-document token too."""
    eod: int
    """1 if documents end with an end-of-document token, else 0."""
    is_split: bool
    """True if sequences are sentences, not documents."""

    @property
    def bounds(self) -> NDArray[np.int64]:
        """The numbers of `documents`, for numpy."""
        return self.documents["value"]

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    @property
    def num_sentences(self) -> int:
        return len(self.offsets)


@inlined
def start_of(table: SentenceTable, sentence: int) -> int:
    """Return the first token of a sentence."""
    return table.offsets[sentence].value >> table.shift


@inlined
def first_sentence(table: SentenceTable, document: int) -> int:
    """Return the first sentence of a document; for the number of documents, the number of sentences."""
    return table.documents[document].value


@compiled
def document_end(table: SentenceTable, document: int) -> int:
    """Return the token after the last of a document."""
    if len(table.document_ends):
        return table.document_ends[document]
    after = table.documents[document + 1].value
    stop = table.offsets[after].value >> table.shift if after < len(table.offsets) else table.stop
    return stop - table.eod


@compiled
def end_of(table: SentenceTable, sentence: int, document: int) -> int:
    """Return the token after the last of a sentence of a document."""
    if sentence + 1 == table.documents[document + 1].value:
        return document_end(table, document)
    return table.offsets[sentence + 1].value >> table.shift


@inlined
def reaching(table: SentenceTable, sentence: int, document: int, limit: int) -> int:
    """Return the first sentence of a document, from `sentence` on, that ends at token `limit` or later, or its last."""
    last = table.documents[document + 1].value - 1
    limit <<= table.shift
    while sentence < last and table.offsets[sentence + 1].value < limit:
        sentence += 1
    return sentence


@compiled
def sentence_at(table: SentenceTable, token: int) -> int:
    """Return the last sentence that begins at a token or before it; 0 if none does."""
    return _last_up_to(table.offsets, table.shift, token)


@compiled
def document_at(table: SentenceTable, sentence: int) -> int:
    return _last_up_to(table.documents, 0, sentence)


@compiled
def _last_up_to(values: Any, shift: int, limit: int) -> int:
    """Return the place of the last of ascending values [n] UNALIGNED that is at most `limit`; 0 if none is."""
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        if values[middle].value >> shift <= limit:
            low = middle
        else:
            high = middle
    return low


def sentence_table(dataset: IndexedDataset, sep_id: int, documents: tuple[int, int] | None = None) -> SentenceTable:
    """Map the sentences of a dataset, or of its documents [first, after the last). Raises DataError without text."""
    first, after = documents or (0, dataset.num_documents)
    bounds = dataset.arrays.documents[first : after + 1]
    begin, end = int(bounds[0]), int(bounds[-1])
    stop = int(dataset.first_tokens(bounds[-1:])[0])
    starts, relative = read_only(dataset.arrays.offsets.view(UNALIGNED))[begin:end], bounds - begin if begin else bounds
    eod = int(ends_with_eod(dataset, sep_id))
    table = SentenceTable(
        starts, shift_of(dataset), read_only(relative.view(UNALIGNED)), _NOTHING, stop, eod, is_split(dataset)
    )
    num_sentences, num_documents = _take_filled(table, _NOTHING.view(UNALIGNED), _NOTHING, _NOTHING)
    if num_sentences == 0:
        raise DataError(
            f"{dataset.prefix}: no text ({after - first} documents, all empty); check what was preprocessed"
        )
    is_full = num_sentences == table.num_sentences
    if is_full and num_documents == table.num_documents:
        return table
    filled = np.empty(0 if is_full else num_sentences, dtype=UNALIGNED)
    filled_documents, ends = np.empty(num_documents + 1, dtype=np.int64), np.empty(num_documents, dtype=np.int64)
    _take_filled(table, filled, filled_documents, ends)
    table = table._replace(documents=read_only(filled_documents.view(UNALIGNED)), document_ends=ends)
    return table if is_full else table._replace(offsets=read_only(filled), shift=0)


def shift_of(dataset: IndexedDataset) -> int:
    """Return what a token adds to an offset, as a power of two."""
    return dataset.arrays.token_offset.bit_length() - 1


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view that has the type of a mapped file for compiled code."""
    view = array.view()
    view.flags.writeable = False
    return view


@compiled
def _take_filled(table: SentenceTable, filled: Any, filled_documents: Any, document_ends: Any) -> tuple[int, int]:
    """Copy the places of the sentences and documents that are not empty into arrays that are not; return their numbers.

    The arrays are those of a SentenceTable, `filled` its offsets.
    """
    sentences = documents = 0
    for document in range(len(table.documents) - 1):
        first, after = first_sentence(table, document), first_sentence(table, document + 1)
        if first == after:
            continue
        end = document_end(table, document)
        before = sentences
        for sentence in range(first, after):
            start = start_of(table, sentence)
            following = min(end, start_of(table, sentence + 1)) if sentence + 1 < after else end
            if following > start:
                if len(filled):
                    filled[sentences].value = start
                sentences += 1
        if sentences > before:
            if len(document_ends):
                filled_documents[documents], document_ends[documents] = before, end
            documents += 1
    if len(document_ends):
        filled_documents[documents] = sentences
    return sentences, documents


def is_split(dataset: IndexedDataset) -> bool:
    """Return whether sequences are sentences: as recorded, else whether any document has more than one."""
    if dataset.metadata is not None:
        return bool(dataset.metadata["split_sentences"])
    return dataset.num_sequences > dataset.num_documents


def ends_with_eod(dataset: IndexedDataset, sep_id: int) -> bool:
    """Return whether each document ends with an end-of-document token.

    This project's datasets record it. Megatron's do not: theirs do if up to 64 documents spread over the dataset all
    end with the separator, which is what its BERT tokenizers append.
    """
    if dataset.metadata is not None:
        return bool(dataset.metadata["append_eod"])
    bounds = dataset.arrays.documents
    filled = np.flatnonzero(bounds[1:] > bounds[:-1])
    if len(filled) == 0:
        return False
    spread = np.unique(np.linspace(0, len(filled) - 1, DOCUMENTS_LOOKED_AT).astype(np.int64))
    last_tokens = dataset.tokens[dataset.first_tokens(bounds[filled[spread] + 1]) - 1]
    return bool((last_tokens == sep_id).all())


def document_ranges(documents: NDArray[np.int64], size: int = SENTENCES_PER_RANGE) -> Iterator[tuple[int, int]]:
    """Yield consecutive documents of about `size` sentences together, at least one document each."""
    documents, first = np.array(documents), 0  # aligned: a search would copy the array each time
    while first < len(documents) - 1:
        after = int(np.searchsorted(documents, documents[first] + size, side="right")) - 1
        after = max(first + 1, after)
        yield first, after
        first = after


def in_order(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Yield `work` of each item, in the items' order, by `workers` threads that are at most two items each ahead.

    Compiled work runs without Python's lock. The results are the same for any number of threads.
    """
    if workers == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        under_way: deque[Future[Result]] = deque()
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) == 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
