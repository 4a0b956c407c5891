"""Read the `.idx` of an indexed dataset; all of it is checked before anything is taken from it.

No array is made in proportion to a count that the file merely claims: its size is compared first. The reader of
megatron-core checks nothing and takes five seconds to import.

MMIDIDX (little-endian, unaligned): magic, u64 version 1, u8 dtype code, u64 N sequences, u64 D = documents + 1,
int32[N] lengths, int64[N] byte offsets, int64[D] first sequence of each document. Source:
megatron/core/datasets/indexed_dataset.py.

TNTIDX (Megatron's and Megatron-DeepSpeed's old `lazy` and `cached` datasets, little-endian): magic, then u64 version 1,
dtype code, element size, N sequences, number of sizes, D; int64[N + 1] first dimension of each sequence, int64[N + 1]
first token of each sequence, int64 sizes, int64[D] first sequence of each document. The .bin is as in MMIDIDX.
fairseq's original has neither D nor the documents. Source: IndexedDatasetBuilder.finalize in
megatron/data/indexed_dataset.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
LEGACY_HEADER = struct.Struct("<8sQQQQQQ")
_FAIRSEQ_HEADER_BYTES = {MAGIC: 26, LEGACY_MAGIC: 48}
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in enumerate(("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"), start=1)
}
LONGEST_SEQUENCE = 2**31 - 1
_CHECK_ITEMS = 1 << 20


@dataclass(frozen=True, slots=True)
class IndexArrays:
    """Contents of an .idx, as unaligned views of the mapped file."""

    dtype: np.dtype[Any]
    """Type of a token in .bin."""
    lengths: NDArray[Any]
    """[N], int32 (MMIDIDX) or int64 (TNTIDX), tokens of each sequence."""
    offsets: NDArray[Any]
    """[N], int64, start of each sequence in .bin."""
    token_offset: int
    """What a token adds to an offset: `dtype.itemsize` (MMIDIDX, bytes) or 1 (TNTIDX)."""
    documents: NDArray[Any]
    """[documents + 1], int64, first sequence of each document, then N."""
    file: NDArray[np.uint8]
    """All bytes of the .idx."""

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1


def read_index(path: Path) -> IndexArrays:
    """Map an .idx. Raises DataError if it is foreign, cut short, or claims counts that its size contradicts."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(LEGACY_HEADER.size)
    is_legacy = head.startswith(LEGACY_MAGIC)
    header = LEGACY_HEADER if is_legacy else HEADER
    if not head.startswith((MAGIC, LEGACY_MAGIC)) or len(head) < header.size:
        raise DataError(f"{path}: not an indexed dataset, or cut short (it begins with {head[:9]!r}, {size} bytes)")
    magic, version, code, *counts = header.unpack(head[: header.size])
    if version != VERSION:
        raise DataError(f"{path}: version {version} of the format, only {VERSION} is known; it may be damaged")
    num_sequences, num_indices = counts[-3] if is_legacy else counts[0], counts[-1]
    num_sizes = counts[-2] if is_legacy else num_sequences
    arrays_bytes = 8 * (2 * (num_sequences + 1) + num_sizes) if is_legacy else 12 * num_sequences
    expected = header.size + arrays_bytes + 8 * num_indices
    if size != expected:
        raise DataError(_wrong_size(path, size, expected, num_sequences, _FAIRSEQ_HEADER_BYTES[magic] + arrays_bytes))
    if code not in DTYPES:
        raise DataError(f"{path}: dtype code {code} is not one of 1 to 8; the file is damaged")
    dtype = DTYPES[code]
    if dtype.kind == "f":
        raise DataError(f"{path}: holds {dtype.name} values, not token ids")
    if is_legacy and counts[0] != dtype.itemsize:
        raise DataError(f"{path}: tokens of {counts[0]} bytes, {dtype.name} has {dtype.itemsize}; the file is damaged")
    if num_indices == 0:
        raise DataError(f"{path}: has no document index (not even its leading 0); the file is damaged")
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    if is_legacy:
        _check_dimensions(_view(mapped, "<i8", header.size, num_sequences + 1), num_sizes, path)
    offsets_at = header.size + (8 * (num_sequences + 1) if is_legacy else 4 * num_sequences)
    lengths_at = offsets_at + 8 * (num_sequences + 1) if is_legacy else header.size
    return IndexArrays(
        dtype=dtype,
        lengths=_view(mapped, "<i8" if is_legacy else "<i4", lengths_at, num_sizes),
        offsets=_view(mapped, "<i8", offsets_at, num_sequences),
        token_offset=1 if is_legacy else dtype.itemsize,
        documents=_view(mapped, "<i8", expected - 8 * num_indices, num_indices),
        file=mapped,
    )


def _view(mapped: NDArray[np.uint8], dtype: str, offset: int, count: int) -> NDArray[Any]:
    item = np.dtype(dtype)
    return mapped[offset : offset + count * item.itemsize].view(item)


def _wrong_size(path: Path, size: int, expected: int, num_sequences: int, fairseq: int) -> str:
    if size == fairseq:
        return (
            f"{path}: fairseq's dataset format, which has Megatron's magic number but no document index; "
            "preprocess the original text with ctxlm preprocess"
        )
    if size == expected + num_sequences:
        return f"{path}: a multimodal dataset (it has a mode for each sequence); only text is supported"
    return (
        f"{path}: {size} bytes, but its header asks for {expected}; the file is cut short or damaged, "
        "copy or make it again"
    )


def _check_dimensions(dimensions: NDArray[np.int64], num_sizes: int, path: Path) -> None:
    """Require one dimension per sequence, so that the sizes are the lengths."""
    for first in range(0, len(dimensions), _CHECK_ITEMS):
        block = dimensions[first : first + _CHECK_ITEMS]
        wrong = np.flatnonzero(block != np.arange(first, first + len(block)))
        if wrong.size:
            raise DataError(
                f"{path}: sequence {max(0, first + int(wrong[0]) - 1)} is not one run of tokens; the file is damaged "
                "or holds something other than text"
            )
    if num_sizes != len(dimensions) - 1:
        raise DataError(f"{path}: {num_sizes} sizes for {len(dimensions) - 1} sequences; the file is damaged")


def check_index(index: IndexArrays, idx_path: Path, bin_path: Path, bin_bytes: int) -> int:
    """Return the number of tokens, once the complete index is known to describe a gapless .bin of `bin_bytes`.

    Raises DataError if a length, an offset or a document does not follow from those before it.
    """
    num_tokens = _check_sequences(index, idx_path)
    _check_documents(index, idx_path)
    expected = num_tokens * index.dtype.itemsize
    if bin_bytes != expected:
        raise DataError(_wrong_bin_size(index, bin_path, bin_bytes, expected))
    return num_tokens


def _check_sequences(index: IndexArrays, idx_path: Path) -> int:
    total = 0
    for first in range(0, index.num_sequences, _CHECK_ITEMS):
        lengths = index.lengths[first : first + _CHECK_ITEMS].astype(np.int64)
        if lengths.min() < 0:
            number = first + int(lengths.argmin())
            raise DataError(f"{idx_path}: sequence {number} has a negative length; the file is damaged")
        if lengths.max() > LONGEST_SEQUENCE:
            raise DataError(
                f"{idx_path}: sequence {first + int(lengths.argmax())} has {int(lengths.max())} tokens, more than the "
                f"{LONGEST_SEQUENCE} that are read here; the file is damaged"
            )
        ends = total + np.cumsum(lengths)
        wrong = np.flatnonzero(index.offsets[first : first + _CHECK_ITEMS] != (ends - lengths) * index.token_offset)
        if wrong.size:
            raise DataError(
                f"{idx_path}: the offset of sequence {first + int(wrong[0])} does not follow from the lengths "
                "before it; the file is damaged, or its sequences have gaps between them"
            )
        total = int(ends[-1])
    return total


def _check_documents(index: IndexArrays, idx_path: Path) -> None:
    documents = index.documents
    if len(documents) == 1 and documents[0] == 0 and index.num_sequences:
        raise DataError(
            f"{idx_path}: {index.num_sequences} sequences and no document: joined by a merge of old versions of "
            "Megatron, which lost them; join the parts again with ctxlm merge"
        )
    if documents[0] != 0 or documents[-1] != index.num_sequences:
        raise DataError(
            f"{idx_path}: the document index runs from {documents[0]} to {documents[-1]}, but must run from 0 to "
            f"{index.num_sequences} (its number of sequences); the file is damaged or was not finished"
        )
    for first in range(0, index.num_documents, _CHECK_ITEMS):
        bounds = documents[first : first + _CHECK_ITEMS + 1]
        if np.any(bounds[1:] < bounds[:-1]):
            raise DataError(f"{idx_path}: the document index goes backwards; the file is damaged")


def _wrong_bin_size(index: IndexArrays, bin_path: Path, bin_bytes: int, expected: int) -> str:
    filled = 0
    for first in range(0, index.num_documents, _CHECK_ITEMS):
        bounds = index.documents[first : first + _CHECK_ITEMS + 1]
        filled += int(np.count_nonzero(bounds[1:] != bounds[:-1]))
    if bin_bytes > expected and bin_bytes - expected == filled * index.dtype.itemsize:
        return (
            f"{bin_path}: one token more for each of its {filled} documents than the .idx counts: "
            "written by a preprocess_data.py that left end-of-document tokens out of the lengths "
            "(Megatron-DeepSpeed --append-eod): all documents but the first are shifted; preprocess the text again"
        )
    return (
        f"{bin_path}: {bin_bytes} bytes, but the index asks for {expected}; it is cut short, or belongs to "
        "another .idx; copy or make it again"
    )
