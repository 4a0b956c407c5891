"""Packing several short samples into one row: best fit, longest first, in windows of a keyed random order.

Windows bound the work and keep rows a mixture of documents. The result depends on (lengths, seq_length, max_sequences,
seed) only. The order is a Permutation, so that memory does not grow with the corpus; threads fill the windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.formats.loops.ranges import in_order
from ctxlm_ds.data.numba_random import Permutation, compiled

WINDOW_SAMPLES = 1 << 16
PURPOSE = "packing"


def pack_samples(
    lengths: NDArray[np.integer[Any]], seq_length: int, max_sequences: int, seed: int, workers: int = 1
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the rows of each window: [samples] sample ids, row after row, and [rows] how many samples each row has."""
    order = Permutation(len(lengths), seed, PURPOSE)

    def pack_window(begin: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        samples = order[np.arange(begin, min(begin + WINDOW_SAMPLES, len(lengths)))]
        packed, counts = fit_rows(np.asarray(lengths[samples], dtype=np.int64), seq_length, max_sequences)
        return samples[packed], counts

    return in_order(pack_window, range(0, len(lengths), WINDOW_SAMPLES), workers)


def fit_rows(
    lengths: NDArray[np.int64], seq_length: int, max_sequences: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Put each item, longest first, into the fullest row that still has room, else into a new one.

    Return [n] item numbers, row after row in the order of placing, and [rows] items of each row.
    """
    items = np.argsort(-lengths, kind="stable")
    row_of, num_rows = _choose_rows(lengths[items], seq_length, max_sequences)
    return items[np.argsort(row_of, kind="stable")], np.bincount(row_of, minlength=num_rows)


@compiled
def _choose_rows(lengths: Any, seq_length: int, max_sequences: int) -> tuple[Any, int]:
    """Return [n] the row of each item, in the items' order, and the number of rows.

    `newest[r]` is the row with room for r tokens that was touched last, `below[row]` the one beneath it on that stack;
    bit r of `rooms` says that there is one, so that finding the fullest row skips 64 rooms at a time.
    """
    row_of = np.empty(len(lengths), dtype=np.int64)
    counts = np.zeros(len(lengths), dtype=np.int64)
    below = np.empty(len(lengths), dtype=np.int64)
    newest = np.full(seq_length + 1, -1, dtype=np.int64)
    rooms = np.zeros(seq_length // 64 + 1, dtype=np.uint64)
    num_rows = 0
    for item in range(len(lengths)):
        room = _smallest_room(rooms, lengths[item])
        if room < 0:
            room, row = seq_length, num_rows
            num_rows += 1
        else:
            row = newest[room]
            newest[room] = below[row]
            if newest[room] < 0:
                rooms[room >> 6] ^= np.uint64(1) << np.uint64(room & 63)
        row_of[item] = row
        counts[row] += 1
        left = room - lengths[item]
        if left and counts[row] < max_sequences:
            below[row] = newest[left]
            newest[left] = row
            rooms[left >> 6] |= np.uint64(1) << np.uint64(left & 63)
    return row_of, num_rows


@compiled
def _smallest_room(rooms: Any, least: int) -> int:
    """Return the smallest number from `least` whose bit is set, or -1."""
    word = least >> 6
    bits = rooms[word] >> np.uint64(least & 63) << np.uint64(least & 63)
    while bits == 0:
        word += 1
        if word == len(rooms):
            return -1
        bits = rooms[word]
    room = word << 6
    while not bits & np.uint64(1):
        bits >>= np.uint64(1)
        room += 1
    return room
