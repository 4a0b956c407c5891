"""Blocks for causal language models: the documents of a dataset one after another, cut into full rows (docs/data.md).

A piece is a range of tokens of which all but the last are inputs, as in Megatron's GPTDataset. `reset_at_documents`
decides what the text is that pieces are cut of: each document (an end-of-document token is predicted and never an
input; Megatron's --reset-attention-mask, --reset-position-ids and --eod-mask-loss have an input without influence and
label there), or the dataset. A row ends when it is full or its sequence slots are; the rest is padding. So rows follow
from the documents' lengths only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.index.record import RECORDS_AT_ONCE, SAMPLE_DTYPE
from ctxlm_ds.data.index.sentence_table import ends_with_eod
from ctxlm_ds.data.numba_random import compiled
from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.errors import DataError

if TYPE_CHECKING:
    from ctxlm_ds.data.dataset.reader import IndexedDataset


def text_bounds(
    dataset: IndexedDataset, eod_id: int, reset_at_documents: bool, documents: tuple[int, int]
) -> tuple[NDArray[np.int64], int]:
    """Return [t + 1] bounds of the texts of documents [first, after the last) in the token stream, and their number.

    Raises DataError if documents do not end with the end-of-document token, or nothing can be predicted.
    """
    if not ends_with_eod(dataset, eod_id):
        raise DataError(
            f"{dataset.prefix}: its documents do not end with the end-of-document token {eod_id}, which data."
            "sample_format blocks puts between documents; run ctxlm preprocess again with --append-eod"
        )
    first, after = documents
    places = np.unique(dataset.first_tokens(dataset.document_indices[first : after + 1]))
    bounds = places if reset_at_documents else places[[0, -1]]
    if int(np.diff(bounds).max(initial=0)) < 2:
        raise DataError(
            f"{dataset.prefix}: no text ({after - first} documents, all empty); check what was preprocessed"
        )
    return bounds.astype(np.int64), len(places) - 1


@compiled
def fill_pieces(bounds: Any, seq_length: int, max_pieces: int, place: Any, out: Any, counts: Any) -> tuple[int, int]:
    """Write rows of `seq_length` inputs in at most `max_pieces` of the texts, whose bounds are [t + 1], to fill `out`.

    `place` [4] is the text and the token where the next piece begins, the room left in the row and the pieces in it; it
    is updated. `counts` gets the pieces of each finished row. Return how many pieces and how many rows were finished.
    """
    text, start, room, pieces = place[0], place[1], place[2], place[3]
    count = rows = 0
    while text < len(bounds) - 1 and count < len(out):
        last = bounds[text + 1] - 1  # the last token is not an input
        if start >= last:
            text += 1
            start = bounds[text]
            continue
        stop = min(last, start + room)
        record = out[count]
        record.a_start = start
        record.a_end = stop + 1
        record.b_start = record.b_end = 0
        record.num_tokens = stop - start
        record.is_random = NO_LABEL
        count += 1
        room -= stop - start
        start = stop
        pieces += 1
        if room == 0 or pieces == max_pieces:
            counts[rows] = pieces
            rows += 1
            room, pieces = seq_length, 0
    place[0], place[1], place[2], place[3] = text, start, room, pieces
    return count, rows


def block_pieces(
    bounds: NDArray[np.int64], seq_length: int, max_pieces: int
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
    """Yield all rows of the texts: [n] records of pieces, and [r] pieces of each row that ends among them."""
    place = np.array([0, bounds[0], seq_length, 0], dtype=np.int64)
    while place[0] < len(bounds) - 1:
        records = np.empty(RECORDS_AT_ONCE, dtype=SAMPLE_DTYPE)
        counts = np.empty(RECORDS_AT_ONCE, dtype=np.int64)
        count, rows = fill_pieces(bounds, seq_length, max_pieces, place, records, counts)
        if place[0] == len(bounds) - 1 and place[3]:
            counts[rows] = place[3]
            rows += 1
        yield records[:count], counts[:rows]
