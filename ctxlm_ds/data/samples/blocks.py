"""Blocks for causal language models: the documents of a dataset one after another, cut into full rows.

A piece is a stretch of tokens of which all but the last are inputs: each predicts the token after it, so that pieces
cut from one text overlap by one token and every token but the text's first is predicted exactly once (Megatron's
GPTDataset cuts its blocks of seq_length + 1 in the same way). Which text that is, `reset_at_documents` says:

- true: each document. A row holds several pieces, which never see each other; a document's end-of-document token is
  predicted and never an input, for in its place Megatron's --reset-attention-mask, --reset-position-ids and
  --eod-mask-loss leave an input without influence and without a label.
- false: the whole dataset. A row is one piece; across a document's end it predicts the next document's first token.

A row ends when it is full or, with `reset`, when its sequence slots are: then the next document starts the next row and
the rest is padding. So rows follow from the documents' lengths alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.sample import NO_LABEL, Sample
from ctxlm_ds.data.samples.record import Record
from ctxlm_ds.data.samples.sentence_table import ends_with_eod
from ctxlm_ds.errors import DataError

if TYPE_CHECKING:
    from ctxlm_ds.data.indexed import IndexedDataset

Piece = tuple[int, int]


def text_bounds(dataset: IndexedDataset, eod_id: int, reset_at_documents: bool) -> tuple[NDArray[np.int64], int]:
    """[t + 1] bounds of the texts in the flat token stream, and the number of documents.

    Raises:
        DataError: documents do not end with the end-of-document token, or nothing can be predicted.
    """
    if not ends_with_eod(dataset, eod_id):
        raise DataError(
            f"{dataset.prefix}: its documents do not end with the end-of-document token {eod_id}, which data."
            "sample_format blocks puts between documents; run tools/preprocess_data.py again with --append-eod"
        )
    documents = np.unique(dataset.sequence_starts[dataset.document_indices])
    bounds = documents if reset_at_documents else documents[[0, -1]]
    if int(np.diff(bounds).max(initial=0)) < 2:
        raise DataError(
            f"{dataset.prefix}: no text ({dataset.num_documents} documents, all empty); check what was preprocessed"
        )
    return bounds.astype(np.int64), len(documents) - 1


def block_rows(bounds: NDArray[np.int64], seq_length: int, max_pieces: int) -> Iterator[list[Piece]]:
    """Rows of pieces (first token, token after the last), of `seq_length` inputs in at most `max_pieces` texts."""
    row: list[Piece] = []
    room = seq_length
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        start, last = begin, end - 1  # the last token is no input
        while start < last:
            stop = min(last, start + room)
            row.append((start, stop + 1))
            room -= stop - start
            start = stop
            if room == 0 or len(row) == max_pieces:
                yield row
                row, room = [], seq_length
    if row:
        yield row


def piece_record(piece: Piece) -> Record:
    """The record of a piece; its length counts the inputs."""
    start, stop = piece
    return start, stop, 0, 0, stop - start - 1, NO_LABEL


def block_sample(tokens: NDArray[np.integer]) -> Sample:
    """A piece's tokens as a Sample, the last of them a label only."""
    ids = tokens.astype(np.int64)
    return Sample(ids, np.zeros(len(ids), dtype=np.int64), np.zeros(len(ids), dtype=np.bool_), NO_LABEL)
