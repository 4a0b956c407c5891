"""Held-out texts kept out of training data: documents that share a word n-gram with them are found.

In: held-out files. Out: a table of n-gram hashes in a file that worker processes map, and whether a document holds one.
The size of the n-gram, 13 words, is GPT-3's (Brown et al. 2020, arXiv:2005.14165, appendix C); GPT-3 cut such places
out with 200 characters around them, here the document goes. Not here: what happens to the document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ctxlm_ds.data.hygiene.words import Hashes, ngram_hashes, word_hashes
from ctxlm_ds.data.numba_random import compiled
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import check_keys, find_sources, read_chunks
from ctxlm_ds.data.sources.types import KEY_HINT, BadRecord, Source
from ctxlm_ds.errors import DataError

_FLAG = "--decontaminate"


@dataclass(frozen=True, slots=True)
class HeldOutCounts:
    """What a table was made of."""

    documents: int
    too_short: int
    """Documents of fewer words than the n-gram: nothing can be found by them."""
    ngrams: int


def build_held_out_table(inputs: Sequence[str], json_keys: Sequence[str], size: int, path: Path) -> HeldOutCounts:
    """Write the open-addressing table (uint64, a power of two, 0 is empty) of all n-grams of some files.

    Memory is about 50 bytes a held-out word while it is built. Raises DataError for a file that cannot be read.
    """
    sources = held_out_sources(inputs)
    check_keys(sources, json_keys)
    pieces: list[Hashes] = []
    documents, too_short = 0, 0
    for text in _texts(sources, json_keys):
        grams = ngram_hashes(word_hashes(text)[0], size)
        documents += 1
        too_short += len(grams) == 0
        pieces.append(grams | np.uint64(1))
    keys = np.unique(np.concatenate(pieces)) if pieces else np.empty(0, dtype=np.uint64)
    table = np.zeros(1 << max(4, int(2 * len(keys)).bit_length()), dtype=np.uint64)
    _fill(table, keys)
    np.save(path, table)
    return HeldOutCounts(documents, too_short, len(keys))


def held_out_sources(inputs: Sequence[str]) -> list[Source]:
    """The files that `--decontaminate` names. Raises DataError where one is missing."""
    try:
        return find_sources(inputs)
    except DataError as error:
        raise DataError(f"{_FLAG}: {error}") from error


def _texts(sources: Sequence[Source], json_keys: Sequence[str]) -> Iterator[str]:
    """The text of every document. Raises DataError at the first that is none."""
    hint = f"; held-out files hold their texts under {' and '.join(map(repr, json_keys))}"
    try:
        for chunk in read_chunks(sources, json_keys):
            for document in parse_chunk(chunk, json_keys):
                if isinstance(document, BadRecord):
                    raise DataError(f"{document}; mend or remove it, held-out files must be read whole")
                yield "\n".join(document.values())
    except DataError as error:
        raise DataError(f"{_FLAG}: {str(error).replace(KEY_HINT, hint)}") from error


def open_held_out_table(path: Path) -> Hashes:
    """The table, memory-mapped."""
    table: Hashes = np.load(path, mmap_mode="r")
    return table


def shares_ngram(words: Hashes, size: int, table: Hashes) -> bool:
    """Whether any run of `size` words of a document is in the table."""
    return bool(_any_inside(ngram_hashes(words, size), table))


@compiled
def _fill(table: Hashes, keys: Hashes) -> None:
    mask = len(table) - 1
    for key in keys:
        slot = int(key >> np.uint64(1)) & mask
        while table[slot] != 0:
            slot = (slot + 1) & mask
        table[slot] = key


@compiled
def _any_inside(grams: Hashes, table: Hashes) -> bool:
    mask = len(table) - 1
    for gram in grams:
        key = gram | np.uint64(1)
        slot = int(key >> np.uint64(1)) & mask
        while table[slot] != 0:
            if table[slot] == key:
                return True
            slot = (slot + 1) & mask
    return False
