"""Documents seen before: exactly, nearly (MinHash with banding), or in part in held-out texts.

Signatures are rensa's R-MinHash, computed in the workers. The index of bands is here because it has to be small: 8
bytes per band in tables at most 70 % full, i.e. 206 to 411 bytes per document (617 while they grow), and the signature,
512 bytes in a file that is removed at the end. rensa's own index takes 2,000 bytes of memory per document.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.hygiene.corpora import required_package
from ctxlm_ds.data.hygiene.words import Hashes, ngram_hashes, word_hashes
from ctxlm_ds.data.numba_random import compiled, mix
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import check_keys, find_sources, read_chunks
from ctxlm_ds.data.sources.types import KEY_HINT, BadRecord, Source
from ctxlm_ds.errors import DataError

SIGNATURE_SEED = 42
SIGNATURE_SLOTS = 128
SHINGLE_WORDS = 5
RECALL_AT_THRESHOLD = 0.95
MAX_LOAD = 0.7
_TAG_SHIFT = np.uint64(32)
_NUMBER_MASK = np.uint64(0xFFFFFFFF)
MAX_DOCUMENTS = (1 << 32) - 2

Signatures = NDArray[np.uint32]


def fingerprint(text: str, words: Hashes) -> bytes:
    """Return 128 bits of a document's words, or of the text itself if it has none."""
    return hashlib.blake2b(words.tobytes() if len(words) else text.encode("utf-8"), digest_size=16).digest()


def signatures(documents: list[Hashes], shingle: int = SHINGLE_WORDS, slots: int = SIGNATURE_SLOTS) -> Signatures:
    """Return R-MinHash signatures of the sets of word shingles, [documents, slots].

    A document shorter than a shingle is one shingle.
    """
    grams = [ngram_hashes(words, min(shingle, max(1, len(words)))) for words in documents]
    offsets = np.zeros(len(grams) + 1, dtype=np.uint64)
    np.cumsum([len(gram) for gram in grams], out=offsets[1:])
    flat = np.concatenate(grams) if grams else np.empty(0, dtype=np.uint64)
    rensa = required_package("rensa", "--near-duplicates")
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(flat, offsets, slots, SIGNATURE_SEED)
    return np.array(matrix.to_rows(), dtype=np.uint32).reshape(len(grams), slots)


def band_rows(threshold: float, slots: int) -> int:
    """Return the most slots per band that still give a pair at the threshold a common band in 19 of 20 cases."""
    for rows in range(slots, 1, -1):
        if 1 - (1 - threshold**rows) ** (slots // rows) >= RECALL_AT_THRESHOLD:
            return rows
    return 1


class NearIndex:
    """Bands of the documents kept so far, in memory, and their signatures, in an unbuffered file."""

    def __init__(self, file: IO[bytes], threshold: float, slots: int = SIGNATURE_SLOTS) -> None:
        self.threshold = threshold
        self._rows_per_band = band_rows(threshold, slots)
        self._tables = np.zeros((slots // self._rows_per_band, 1 << 10), dtype=np.uint64)
        self._file = file
        self._count = 0

    def find(self, signature: Signatures) -> int | None:
        """Return the number of the first document kept, from 0, that this one nearly equals; None without one."""
        numbers = np.unique(_probe(self._tables, _band_keys(signature, self._rows_per_band), np.uint64(0)))
        for number in numbers[numbers > 0].tolist():
            stored = os.pread(self._file.fileno(), signature.nbytes, (number - 1) * signature.nbytes)
            if np.mean(np.frombuffer(stored, np.uint32) == signature) >= self.threshold:
                return int(number) - 1
        return None

    def add(self, signature: Signatures, has_words: bool = True) -> None:
        """Add a document that is kept. One without words is never found: its set of shingles is empty."""
        if self._count >= MAX_DOCUMENTS:
            raise DataError(f"more than {MAX_DOCUMENTS:,} documents; prepare the corpus in parts")
        self._file.write(signature.tobytes())
        self._count += 1
        if not has_words:
            return
        if self._count > MAX_LOAD * self._tables.shape[1]:
            larger = np.zeros((len(self._tables), 2 * self._tables.shape[1]), dtype=np.uint64)
            _copy(self._tables, larger)
            self._tables = larger
        _probe(self._tables, _band_keys(signature, self._rows_per_band), np.uint64(self._count))


@compiled
def _band_keys(signature: Signatures, rows: int) -> Hashes:
    keys = np.empty(len(signature) // rows, dtype=np.uint64)
    for band in range(len(keys)):
        state = np.uint64(band + 1)
        for slot in range(band * rows, (band + 1) * rows):
            state = mix(state ^ np.uint64(signature[slot]))
        keys[band] = state
    return keys


@compiled
def _probe(tables: NDArray[np.uint64], keys: Hashes, number: np.uint64) -> Hashes:
    """Return the first document (from 1; 0 without one) under each key, after adding `number` to the free ones.

    An entry is the key's upper half and the number. Nothing is added if `number` is 0.
    """
    found = np.zeros(len(keys), dtype=np.uint64)
    mask = tables.shape[1] - 1
    for band in range(len(keys)):
        tag = keys[band] >> _TAG_SHIFT
        slot = int(tag) & mask
        while tables[band, slot] != 0 and tables[band, slot] >> _TAG_SHIFT != tag:
            slot = (slot + 1) & mask
        found[band] = tables[band, slot] & _NUMBER_MASK
        if found[band] == 0 and number:
            tables[band, slot] = (tag << _TAG_SHIFT) | number
    return found


@compiled
def _copy(tables: NDArray[np.uint64], larger: NDArray[np.uint64]) -> None:
    mask = larger.shape[1] - 1
    for band in range(len(tables)):
        for entry in tables[band]:
            slot = int(entry >> _TAG_SHIFT) & mask
            while entry != 0 and larger[band, slot] != 0:
                slot = (slot + 1) & mask
            larger[band, slot] |= entry


def held_out_sources(inputs: Sequence[str]) -> list[Source]:
    """Return the files that `--decontaminate` names. Raises DataError if one is missing."""
    try:
        return find_sources(inputs)
    except DataError as error:
        raise DataError(f"--decontaminate: {error}") from error


def write_held_out(inputs: Sequence[str], size: int, path: Path) -> dict[str, int]:
    """Write the sorted hashes of all word n-grams of held-out files, which workers map; return what they hold.

    Memory: 16 bytes per held-out word while it is written. Raises DataError for a file that cannot be read.
    """
    sources = held_out_sources(inputs)
    found: list[Hashes] = []
    try:
        check_keys(sources, ("text",))
        for chunk in read_chunks(sources, ("text",)):
            for document in parse_chunk(chunk, ("text",)):
                if isinstance(document, BadRecord):
                    raise DataError(f"{document}; correct or remove it, held-out files must be read completely")
                found.append(ngram_hashes(word_hashes(document["text"])[0], size))
    except DataError as error:
        hint = "; held-out files hold their texts under 'text'"
        raise DataError(f"--decontaminate: {str(error).replace(KEY_HINT, hint)}") from error
    grams = np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.uint64)
    np.save(path, grams)
    too_short = sum(len(gram) == 0 for gram in found)
    return {"documents": len(found), "too_short": too_short, "ngrams": len(grams)}


def shares_ngram(words: Hashes, size: int, held_out: Hashes) -> bool:
    """Return whether any run of `size` words of a document is in the sorted held-out hashes."""
    grams = np.sort(ngram_hashes(words, size))
    places = np.searchsorted(held_out, grams)
    inside = places < len(held_out)
    return bool((held_out[places[inside]] == grams[inside]).any())
