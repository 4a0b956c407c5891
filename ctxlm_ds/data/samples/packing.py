"""Several short samples in one row: best fit, longest first, in windows of a keyed random order of the samples.

In: lengths (special tokens included). Out: rows as lists of sample ids. Windows bound the work and keep rows a mixture
of documents; the result depends on (lengths, seq_length, max_sequences, seed) alone. Half a million samples a second.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.randomness import generator

WINDOW_SAMPLES = 1 << 16


def pack_samples(
    lengths: NDArray[np.integer], seq_length: int, max_sequences: int, seed: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Rows of each window: [samples] sample ids, row after row, and [rows] how many samples each row has."""
    order = generator(seed, "packing").permutation(len(lengths))
    for begin in range(0, len(order), WINDOW_SAMPLES):
        window = order[begin : begin + WINDOW_SAMPLES]
        window_lengths = np.asarray(lengths[window], dtype=np.int64)
        longest_first = np.argsort(-window_lengths, kind="stable")
        rows = fit_rows(window_lengths[longest_first].tolist(), seq_length, max_sequences)
        counts = np.array([len(row) for row in rows], dtype=np.int64)
        yield window[longest_first[np.concatenate(rows)]], counts


def fit_rows(lengths: list[int], seq_length: int, max_sequences: int) -> list[list[int]]:
    """Put each item into the fullest row that still has room, else into a new one; rows of item numbers.

    `open_rows[r]` holds the rows with room for r tokens and bit r of `rooms` says that there is one, so that finding
    the fullest row is one operation on a whole number.
    """
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(seq_length + 1)]
    rooms = 0
    for item, length in enumerate(lengths):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
            rows[row].append(item)
        else:
            room, row = seq_length, len(rows)
            rows.append([item])
        left = room - length
        if left and len(rows[row]) < max_sequences:
            open_rows[left].append(row)
            rooms |= 1 << left
    return rows
