"""Documents seen before: exactly (but for case, blanks and punctuation) and nearly (MinHash with banding).

In: fingerprints and MinHash signatures, a document at a time, in order. Out: whether an earlier one stands for it.
Signatures are rensa's R-MinHash, computed in the workers; the index of bands is here because it must stay small:
- exact: 16 bytes a document in a table at most 70 % full, so 23 to 46 bytes (up to 69 while it grows);
- near: 8 bytes a band, so for 128 slots and threshold 0.8 (18 bands) 206 to 411 bytes (617 while it grows), and the
  signature, 4 bytes a slot, in a file beside the output that is removed at the end.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.hygiene.words import Hashes, ngram_hashes
from ctxlm_ds.data.numba_random import compiled, mix
from ctxlm_ds.errors import DataError

SIGNATURE_SEED = 42
RECALL_AT_THRESHOLD = 0.95
MAX_LOAD = 0.7
BUCKET_LIMIT = 8
"""Documents remembered under one key of a band; more only share what everybody has, and would slow every look-up."""
_BLOCK_ROWS = 1 << 16
_TAG_SHIFT = np.uint64(32)
_ROW_MASK = np.uint64(0xFFFFFFFF)
MAX_DOCUMENTS = (1 << 32) - 2

Signatures = NDArray[np.uint32]


def fingerprint(text: str, words: Hashes) -> bytes:
    """128 bits of a document's words; of the text itself where it has none."""
    return hashlib.blake2b(words.tobytes() if len(words) else text.encode("utf-8"), digest_size=16).digest()


def require_rensa() -> Any:
    """The library. Raises DataError where it is missing."""
    try:
        import rensa
    except ImportError as error:
        raise DataError(
            "--near-duplicates needs the package rensa, which is not installed here; pip install rensa"
        ) from error
    return rensa


def signatures(documents: list[Hashes], shingle: int, num_slots: int) -> Signatures:
    """[documents, slots] R-MinHash signatures of the sets of word shingles; a shorter document is one shingle."""
    rensa = require_rensa()
    grams = [ngram_hashes(words, min(shingle, max(1, len(words)))) for words in documents]
    offsets = np.zeros(len(grams) + 1, dtype=np.uint64)
    np.cumsum([len(gram) for gram in grams], out=offsets[1:])
    flat = np.concatenate(grams) if grams else np.empty(0, dtype=np.uint64)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(flat, offsets, num_slots, SIGNATURE_SEED)
    return np.array(matrix.to_rows(), dtype=np.uint32).reshape(len(grams), num_slots)


def band_rows(threshold: float, num_slots: int) -> int:
    """Slots a band: the most with which a pair at the threshold still meets in some band, in 19 of 20 cases."""
    for rows in range(num_slots, 1, -1):
        if 1 - (1 - threshold**rows) ** (num_slots // rows) >= RECALL_AT_THRESHOLD:
            return rows
    return 1


class ExactIndex:
    """Fingerprints of the documents kept so far."""

    def __init__(self) -> None:
        self._table = np.zeros((1 << 12, 2), dtype=np.uint64)
        self._count = 0

    def seen(self, print_: bytes) -> bool:
        """Whether a fingerprint is there already; it is after this."""
        first, second = np.frombuffer(print_, dtype=np.uint64)
        if self._count > MAX_LOAD * len(self._table):
            larger = np.zeros((2 * len(self._table), 2), dtype=np.uint64)
            _copy_prints(self._table, larger)
            self._table = larger
        new = bool(_add_print(self._table, first, second | np.uint64(1)))
        self._count += new
        return not new


@compiled
def _add_print(table: NDArray[np.uint64], first: np.uint64, second: np.uint64) -> bool:
    mask = len(table) - 1
    slot = int(first) & mask
    while table[slot, 1] != 0:
        if table[slot, 0] == first and table[slot, 1] == second:
            return False
        slot = (slot + 1) & mask
    table[slot, 0], table[slot, 1] = first, second
    return True


@compiled
def _copy_prints(table: NDArray[np.uint64], larger: NDArray[np.uint64]) -> None:
    for index in range(len(table)):
        if table[index, 1] != 0:
            _add_print(larger, table[index, 0], table[index, 1])


class NearIndex:
    """Bands and signatures of the documents kept so far; `close` removes the file of signatures."""

    def __init__(self, path: Path, threshold: float, num_slots: int) -> None:
        self.threshold = threshold
        self.num_slots = num_slots
        self.rows_a_band = band_rows(threshold, num_slots)
        self.num_bands = num_slots // self.rows_a_band
        self._tables = np.zeros((self.num_bands, 1 << 10), dtype=np.uint64)
        self._file = _SignatureFile(path, num_slots)

    def duplicate_of(self, signature: Signatures) -> int | None:
        """The earliest kept document (counted from 0) that this one nearly equals; it is kept where there is none."""
        keys = _band_keys(signature, self.num_bands, self.rows_a_band)
        for row in np.unique(_candidates(self._tables, keys)):
            if np.count_nonzero(self._file.row(int(row)) == signature) >= self.threshold * self.num_slots:
                return int(row)
        self._keep(signature, keys)
        return None

    def pass_over(self, signature: Signatures) -> None:
        """Number a kept document that is nobody's near duplicate: one without words, whose set of shingles is empty."""
        self._number(signature)

    def _number(self, signature: Signatures) -> int:
        number = self._file.append(signature)
        if number >= MAX_DOCUMENTS:
            raise DataError(f"more than {MAX_DOCUMENTS:,} documents; prepare the corpus in parts")
        return number

    def _keep(self, signature: Signatures, keys: Hashes) -> None:
        number = self._number(signature)
        if number > MAX_LOAD * self._tables.shape[1]:
            larger = np.zeros((self.num_bands, 2 * self._tables.shape[1]), dtype=np.uint64)
            _grow_bands(self._tables, larger)
            self._tables = larger
        _insert(self._tables, keys, number)

    def close(self) -> None:
        self._file.close()


class _SignatureFile:
    """Signatures by number: the last block in memory, the others in a file of the page cache's."""

    def __init__(self, path: Path, num_slots: int) -> None:
        self._path = path
        self._file: IO[bytes] = open(path, "w+b")  # noqa: SIM115 - closed by close()
        self._block = np.empty((_BLOCK_ROWS, num_slots), dtype=np.uint32)
        self._count = 0

    def append(self, signature: Signatures) -> int:
        number = self._count
        self._block[number % _BLOCK_ROWS] = signature
        self._count += 1
        if self._count % _BLOCK_ROWS == 0:
            self._file.seek(0, 2)
            self._file.write(self._block.tobytes())
            self._file.flush()
        return number

    def row(self, number: int) -> Signatures:
        if number // _BLOCK_ROWS == self._count // _BLOCK_ROWS:
            last: Signatures = self._block[number % _BLOCK_ROWS]
            return last
        self._file.seek(number * self._block.itemsize * self._block.shape[1])
        return np.frombuffer(self._file.read(self._block.itemsize * self._block.shape[1]), dtype=np.uint32)

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


@compiled
def _band_keys(signature: Signatures, num_bands: int, rows: int) -> Hashes:
    keys = np.empty(num_bands, dtype=np.uint64)
    for band in range(num_bands):
        state = np.uint64(band + 1)
        for slot in range(band * rows, (band + 1) * rows):
            state = mix(state ^ np.uint64(signature[slot]))
        keys[band] = state
    return keys


@compiled
def _candidates(tables: NDArray[np.uint64], keys: Hashes) -> NDArray[np.int64]:
    """Numbers of the documents under a document's keys. An entry is the key's upper half and the number plus one."""
    found = np.empty(len(keys) * BUCKET_LIMIT, dtype=np.int64)
    count = 0
    mask = tables.shape[1] - 1
    for band in range(len(keys)):
        tag = keys[band] >> _TAG_SHIFT
        slot = int(tag) & mask
        while tables[band, slot] != 0:
            entry = tables[band, slot]
            if entry >> _TAG_SHIFT == tag and count < (band + 1) * BUCKET_LIMIT:
                found[count] = np.int64(entry & _ROW_MASK) - 1
                count += 1
            slot = (slot + 1) & mask
    return found[:count]


@compiled
def _insert(tables: NDArray[np.uint64], keys: Hashes, number: int) -> None:
    mask = tables.shape[1] - 1
    for band in range(len(keys)):
        tag = keys[band] >> _TAG_SHIFT
        slot = int(tag) & mask
        copies = 0
        while tables[band, slot] != 0 and copies < BUCKET_LIMIT:
            copies += tables[band, slot] >> _TAG_SHIFT == tag
            slot = (slot + 1) & mask
        if copies < BUCKET_LIMIT:
            tables[band, slot] = (tag << _TAG_SHIFT) | np.uint64(number + 1)


@compiled
def _grow_bands(tables: NDArray[np.uint64], larger: NDArray[np.uint64]) -> None:
    mask = larger.shape[1] - 1
    for band in range(len(tables)):
        for entry in tables[band]:
            if entry != 0:
                slot = int(entry >> _TAG_SHIFT) & mask
                while larger[band, slot] != 0:
                    slot = (slot + 1) & mask
                larger[band, slot] = entry
