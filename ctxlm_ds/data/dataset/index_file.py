"""The `.idx` of an indexed dataset: read whatever format it has, and proved before anything is taken from it.

In: the path of an .idx (and the size of its .bin). Out: IndexArrays, views of the mapped file. Not here: the tokens
(reader.py), writing (writer.py). No array is made in proportion to a count that the file merely claims: its size is
compared first.

MMIDIDX (little-endian, unaligned): magic, u64 version 1, u8 dtype code, u64 N sequences, u64 D = documents + 1,
int32[N] lengths, int64[N] byte offsets, int64[D] first sequence of each document. Source:
megatron/core/datasets/indexed_dataset.py.

TNTIDX (Megatron's and Megatron-DeepSpeed's old `lazy` and `cached` datasets, little-endian): magic, then u64 version 1,
dtype code, element size, N sequences, number of sizes, D; int64[N + 1] where the dimensions of a sequence begin,
int64[N + 1] where its tokens begin (in tokens), int64 sizes, int64[D] first sequence of each document. The tokens lie
in .bin as in MMIDIDX. fairseq's original has neither D nor the documents. Source: IndexedDatasetBuilder.finalize in
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
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in enumerate(("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"), start=1)
}
LONGEST_SEQUENCE = 2**31 - 1
_CHECK_ITEMS = 1 << 20
LEGACY_HEADER = struct.Struct("<8sQQQQQQ")
_FAIRSEQ_HEADER_BYTES = 48


@dataclass(frozen=True, slots=True)
class IndexArrays:
    """What an .idx says, as unaligned views of the mapped file."""

    dtype: np.dtype[Any]
    """Type of a token in .bin."""
    lengths: NDArray[Any]
    """[N], int32 (MMIDIDX) or int64 (TNTIDX), tokens of each sequence."""
    offsets: NDArray[Any]
    """[N], int64, where each sequence begins in .bin."""
    token_offset: int
    """What a token adds to an offset: `dtype.itemsize` (MMIDIDX, bytes) or 1 (TNTIDX)."""
    documents: NDArray[Any]
    """[documents + 1], int64, first sequence of each document, then N."""
    file: NDArray[np.uint8]
    """The whole .idx."""

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1


def read_index(path: Path) -> IndexArrays:
    """Map an .idx. Raises DataError where it is foreign, cut, or claims what its size does not bear out."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if head.startswith(LEGACY_MAGIC):
        from ctxlm_ds.data.dataset.index_file import read_legacy_index

        return read_legacy_index(path)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise DataError(f"{path}: not an indexed dataset (it begins with {head[:9]!r}, {size} bytes)")
    _, version, code, num_sequences, num_indices = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path}: version {version} of the format, only {VERSION} is known; it may be damaged")
    expected = HEADER.size + 12 * num_sequences + 8 * num_indices
    if size != expected:
        raise DataError(_wrong_size(path, size, expected, num_sequences))
    dtype = token_type(path, code)
    if num_indices == 0:
        raise DataError(f"{path}: has no document index (not even its leading 0); the file is damaged")
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    offsets_at = HEADER.size + 4 * num_sequences
    return IndexArrays(
        dtype=dtype,
        lengths=view(mapped, "<i4", HEADER.size, num_sequences),
        offsets=view(mapped, "<i8", offsets_at, num_sequences),
        token_offset=dtype.itemsize,
        documents=view(mapped, "<i8", offsets_at + 8 * num_sequences, num_indices),
        file=mapped,
    )


def view(mapped: NDArray[np.uint8], dtype: str, offset: int, count: int) -> NDArray[Any]:
    """`count` items of a mapped file from byte `offset` on."""
    item = np.dtype(dtype)
    return mapped[offset : offset + count * item.itemsize].view(item)


def token_type(path: Path, code: int) -> np.dtype[Any]:
    """The type of a dtype code. Raises DataError for an unknown one, and for floating point."""
    if code not in DTYPES:
        raise DataError(f"{path}: dtype code {code} is not one of 1 to 8; the file is damaged")
    if DTYPES[code].kind == "f":
        raise DataError(f"{path}: holds {DTYPES[code].name} values, not token ids")
    return DTYPES[code]


def _wrong_size(path: Path, size: int, expected: int, num_sequences: int) -> str:
    # fairseq writes the same magic and version, N at 18, and no document index: 26 bytes of header.
    if size == 26 + 12 * num_sequences:
        return (
            f"{path}: fairseq's dataset format, which has Megatron's magic number but no document index; "
            "preprocess the original text with tools/preprocess_data.py"
        )
    if size == expected + num_sequences:
        return f"{path}: a multimodal dataset (it has a mode for each sequence); only text is supported"
    return (
        f"{path}: {size} bytes where its header asks for {expected}; the file is cut short or damaged, "
        "copy or make it again"
    )


def check_index(index: IndexArrays, idx_path: Path, bin_path: Path, bin_bytes: int) -> int:
    """The number of tokens, once everything in the index is known to describe a gapless .bin of `bin_bytes`.

    Raises DataError where a length, an offset or a document does not follow from those before it.
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
        part = index.lengths[first : first + _CHECK_ITEMS].astype(np.int64)
        if part.min() < 0:
            raise DataError(
                f"{idx_path}: sequence {first + int(part.argmin())} has a negative length; the file is damaged"
            )
        if part.max() > LONGEST_SEQUENCE:
            raise DataError(
                f"{idx_path}: sequence {first + int(part.argmax())} has {int(part.max())} tokens, more than the "
                f"{LONGEST_SEQUENCE} that are read here; the file is damaged"
            )
        ends = total + np.cumsum(part)
        wrong = np.flatnonzero(index.offsets[first : first + _CHECK_ITEMS] != (ends - part) * index.token_offset)
        if wrong.size:
            raise DataError(
                f"{idx_path}: the offset of sequence {first + int(wrong[0])} does not follow from the lengths "
                "before it; the file is damaged, or its sequences do not lie one after another"
            )
        total = int(ends[-1])
    return total


def _check_documents(index: IndexArrays, idx_path: Path) -> None:
    documents = index.documents
    if len(documents) == 1 and documents[0] == 0 and index.num_sequences:
        raise DataError(
            f"{idx_path}: {index.num_sequences} sequences and no document: joined by a merge of old versions of "
            "Megatron, which lost them; join the parts again with tools/merge_datasets.py"
        )
    if documents[0] != 0 or documents[-1] != index.num_sequences:
        raise DataError(
            f"{idx_path}: the document index runs from {documents[0]} to {documents[-1]} where 0 to "
            f"{index.num_sequences} (its number of sequences) is needed; the file is damaged or was not finished"
        )
    for first in range(0, index.num_documents, _CHECK_ITEMS):
        part = documents[first : first + _CHECK_ITEMS + 1]
        if np.any(part[1:] < part[:-1]):
            raise DataError(f"{idx_path}: the document index goes backwards; the file is damaged")


def _filled_documents(index: IndexArrays) -> int:
    documents, filled = index.documents, 0
    for first in range(0, index.num_documents, _CHECK_ITEMS):
        part = documents[first : first + _CHECK_ITEMS + 1]
        filled += int(np.count_nonzero(part[1:] != part[:-1]))
    return filled


def _wrong_bin_size(index: IndexArrays, bin_path: Path, bin_bytes: int, expected: int) -> str:
    extra = bin_bytes - expected
    filled = _filled_documents(index)
    if extra > 0 and extra == filled * index.dtype.itemsize:
        return (
            f"{bin_path}: one token more for each of its {filled} documents than the .idx counts: "
            "written by a preprocess_data.py that left end-of-document tokens out of the lengths "
            "(Megatron-DeepSpeed --append-eod): all documents but the first are shifted; preprocess the text again"
        )
    return (
        f"{bin_path}: {bin_bytes} bytes where the index asks for {expected}; it is cut short, or belongs to "
        "another .idx; copy or make it again"
    )


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
