"""TNTIDX, the index of Megatron's and Megatron-DeepSpeed's old `lazy` and `cached` datasets, read as any other.

In: the path of such an .idx. Out: IndexArrays (index_file.py). Little-endian: magic, then u64 version 1, dtype code,
element size, N sequences, number of sizes, D = documents + 1; int64[N + 1] where the dimensions of a sequence begin,
int64[N + 1] where its tokens begin (in tokens), int64 sizes, int64[D] first sequence of each document. The tokens lie
in .bin as in MMIDIDX. fairseq's original has neither D nor the documents. Source: IndexedDatasetBuilder.finalize in
megatron/data/indexed_dataset.py.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.dataset.index_file import VERSION, IndexArrays, token_type, view
from ctxlm_ds.errors import DataError

LEGACY_HEADER = struct.Struct("<8sQQQQQQ")
_FAIRSEQ_HEADER_BYTES = 48
_CHECK_ITEMS = 1 << 20


def read_legacy_index(path: Path) -> IndexArrays:
    """Map a TNTIDX .idx.

    Raises:
        DataError: it is fairseq's, cut, of another version, or its sequences are not plain runs of tokens.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(LEGACY_HEADER.size)
    if len(head) < LEGACY_HEADER.size:
        raise DataError(f"{path}: {size} bytes, its header alone has {LEGACY_HEADER.size}; the file is cut short")
    _, version, code, element_bytes, num_sequences, num_sizes, num_indices = LEGACY_HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path}: version {version} of the format, only {VERSION} is known; it may be damaged")
    arrays_bytes = 8 * (2 * (num_sequences + 1) + num_sizes)
    if size == _FAIRSEQ_HEADER_BYTES + arrays_bytes:
        raise DataError(
            f"{path}: fairseq's old dataset format (TNTIDX without a document index); preprocess the original text "
            "with tools/preprocess_data.py"
        )
    expected = LEGACY_HEADER.size + arrays_bytes + 8 * num_indices
    if size != expected:
        raise DataError(
            f"{path}: {size} bytes where its header asks for {expected}; the file is cut short or damaged, "
            "copy or make it again"
        )
    dtype = token_type(path, code)
    if element_bytes != dtype.itemsize:
        raise DataError(
            f"{path}: tokens of {element_bytes} bytes where {dtype.name} has {dtype.itemsize}; the file is damaged"
        )
    if num_indices == 0:
        raise DataError(f"{path}: has no document index (not even its leading 0); the file is damaged")
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    offsets_at = LEGACY_HEADER.size + 8 * (num_sequences + 1)
    sizes_at = offsets_at + 8 * (num_sequences + 1)
    _check_dimensions(view(mapped, "<i8", LEGACY_HEADER.size, num_sequences + 1), num_sizes, path)
    return IndexArrays(
        dtype=dtype,
        lengths=view(mapped, "<i8", sizes_at, num_sizes),
        offsets=view(mapped, "<i8", offsets_at, num_sequences),
        token_offset=1,
        documents=view(mapped, "<i8", sizes_at + 8 * num_sizes, num_indices),
        file=mapped,
    )


def _check_dimensions(dimensions: NDArray[np.int64], num_sizes: int, path: Path) -> None:
    """Every sequence has one dimension: its length is the size of the same number."""
    for first in range(0, len(dimensions), _CHECK_ITEMS):
        part = dimensions[first : first + _CHECK_ITEMS]
        wrong = np.flatnonzero(part != np.arange(first, first + len(part)))
        if wrong.size:
            raise DataError(
                f"{path}: sequence {max(0, first + int(wrong[0]) - 1)} is not one run of tokens; the file is damaged "
                "or holds something other than text"
            )
    if num_sizes != len(dimensions) - 1:
        raise DataError(f"{path}: {num_sizes} sizes for {len(dimensions) - 1} sequences; the file is damaged")
