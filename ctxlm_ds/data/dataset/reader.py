"""Read Megatron's indexed dataset, `.bin` and `.idx`, memory-mapped.

`.bin` is all tokens, one after another; `.idx` says where sequences and documents begin. Everything is checked before
anything is taken: a damaged or foreign file raises DataError. The slow checks are in inspection.py. No array is made in
proportion to a count that the file merely claims: its size is compared first. The reader of megatron-core checks
nothing and takes five seconds to import.

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

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.dataset.metadata import METADATA_FORMAT, check_digest, manifest_path, read_manifest, read_metadata
from ctxlm_ds.errors import DataError

_DECIDING = ("sha256", "tokenizer_fingerprint", "split_sentences", "append_eod", "eod_id")


def dataset_file(prefix: str | Path, extension: str) -> Path:
    """Return `PREFIX.bin`, `PREFIX.idx`, `PREFIX.json` or `PREFIX.spans`."""
    return Path(f"{prefix}.{extension}")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return Megatron's choice: uint16 below 65,500 tokens, else int32."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class OpeningProof:
    """Results of opening a dataset, for another process that opens the same files."""

    files: tuple[tuple[int, int, int], ...]
    """Size, time of change (ns) and inode of .idx and .bin."""
    num_tokens: int
    metadata: dict[str, Any] | None


class IndexedDataset:
    """One dataset, opened by its prefix (the path without .bin/.idx). Safe to open in several processes."""

    def __init__(self, prefix: str | Path, proof: OpeningProof | None = None) -> None:
        """Open the files and check them; unchanged files with a `proof` (from a pickled dataset) are not checked again.

        Raises DataError if a file is missing, cut short, of another format, or if they do not belong together.
        """
        self.prefix = str(prefix)
        idx_path, bin_path = dataset_file(prefix, "idx"), dataset_file(prefix, "bin")
        for path in (idx_path, bin_path):
            if not path.is_file():
                raise DataError(f"{path}: no such file{_suggestion(Path(self.prefix))}")
        files = (_file_state(idx_path), _file_state(bin_path))
        bin_bytes = files[1][0]
        self.arrays = read_index(idx_path)
        """Contents of the .idx, as views of the file."""
        self.dtype = self.arrays.dtype
        self.num_sequences, self.num_documents = self.arrays.num_sequences, self.arrays.num_documents
        if proof is None or proof.files != files:
            num_tokens = check_index(self.arrays, idx_path, bin_path, bin_bytes)
            counts = {"sequences": self.num_sequences, "documents": self.num_documents, "tokens": num_tokens}
            proof = OpeningProof(files, num_tokens, read_metadata(prefix, counts | {"dtype": self.dtype.name}))
        self.proof = proof
        """Results of opening, for opening it again."""
        self.num_tokens = proof.num_tokens
        self.metadata = proof.metadata
        """Contents of `PREFIX.json`; None for a dataset of Megatron."""
        self.tokens: NDArray[Any] = np.memmap(bin_path, self.dtype, "r") if bin_bytes else np.empty(0, self.dtype)
        """All tokens, flat, memory-mapped."""

    def __reduce__(self) -> tuple[Any, tuple[str, OpeningProof]]:
        return IndexedDataset, (self.prefix, self.proof)

    @cached_property
    def document_indices(self) -> NDArray[np.int64]:
        """[documents + 1], document i is sequences [i] to [i + 1]; an aligned copy made at first use."""
        return np.array(self.arrays.documents, dtype=np.int64)

    @property
    def has_spans(self) -> bool:
        """True if spans of the text are given (ctxlm preprocess --spans-key)."""
        return "spans" in ((self.metadata or {}).get("sha256") or {})

    @cached_property
    def continues_span(self) -> NDArray[np.uint8]:
        """[tokens] 1 at a token that belongs to the given span of the token before it; memory-mapped `.spans`.

        Raises DataError if the file is missing or has another size.
        """
        path = dataset_file(self.prefix, "spans")
        num_bytes = path.stat().st_size if path.is_file() else None
        if num_bytes != self.num_tokens:
            found = "no such file" if num_bytes is None else f"{num_bytes} bytes, {self.num_tokens} tokens need as many"
            raise DataError(f"{path}: {found}; copy it again, or run ctxlm preprocess again")
        return np.memmap(path, np.uint8, "r") if num_bytes else np.empty(0, dtype=np.uint8)

    def with_tokens(self, tokens: NDArray[Any]) -> IndexedDataset:
        """Return these sequences with another value for each token."""
        other = IndexedDataset(self.prefix, self.proof)
        other.tokens = tokens
        return other

    @cached_property
    def index_digest(self) -> str:
        """Return the sha256 (hex) of the .idx. Raises DataError if a recorded one differs."""
        digest = hashlib.sha256(self.arrays.file.data).hexdigest()
        self.check_recorded("idx", digest)
        return digest

    def check_recorded(self, extension: str, digest: str) -> None:
        """Raise DataError if a recorded sha256 of a file is another one."""
        for where, recorded in self.recorded_digests():
            if extension in recorded:
                check_digest(dataset_file(self.prefix, extension), digest, recorded[extension], where)

    def recorded_digests(self) -> Iterator[tuple[Path, dict[str, str]]]:
        """Yield the files that hold checksums of this dataset, each with its checksums by extension."""
        if self.metadata is not None:
            yield dataset_file(self.prefix, "json"), self.metadata.get("sha256") or {}
        manifest = read_manifest(self.prefix)
        if manifest is not None:
            yield manifest_path(self.prefix), manifest

    @cached_property
    def fingerprint(self) -> str:
        """Return the sha256 (hex) of the .idx, the size of .bin, and the checksums and settings in the JSON, if any.

        Raises DataError if the .idx is not the one whose checksum is recorded.
        """
        digest = hashlib.sha256(f"{METADATA_FORMAT} {self.tokens.nbytes} {self.index_digest}".encode())
        if self.metadata is not None:
            digest.update(json.dumps({key: self.metadata.get(key) for key in _DECIDING}, sort_keys=True).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return self.num_sequences

    def sequence(self, index: int) -> NDArray[Any]:
        """Return [n], the tokens of one sequence (a view of the file)."""
        start = int(self.arrays.offsets[index]) // self.arrays.token_offset
        return self.tokens[start : start + int(self.arrays.lengths[index])]

    def document(self, index: int) -> Iterator[NDArray[Any]]:
        for sequence in range(int(self.arrays.documents[index]), int(self.arrays.documents[index + 1])):
            yield self.sequence(sequence)

    def document_sequences(self, first: int, after: int) -> NDArray[np.int64]:
        """Return [after - first], sequences of documents `first` to `after` (exclusive)."""
        return np.diff(self.arrays.documents[first : after + 1])

    def document_tokens(self, first: int, after: int) -> NDArray[np.int64]:
        """Return [after - first], tokens of documents `first` to `after` (exclusive)."""
        return np.diff(self.first_tokens(self.arrays.documents[first : after + 1]))

    def token_range(self, documents: tuple[int, int]) -> tuple[int, int]:
        """Return the first token of documents [first, after the last), and the one after their last."""
        first, after = self.first_tokens(self.arrays.documents[list(documents)]).tolist()
        return first, after

    def first_tokens(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first token of each of `sequences`; for the number of sequences, the number of tokens."""
        places = np.full(len(sequences), self.num_tokens, dtype=np.int64)
        inside = sequences < self.num_sequences
        places[inside] = self.arrays.offsets[sequences[inside]] // self.arrays.token_offset
        return places

    def lengths(self, first: int, after: int) -> NDArray[np.int64]:
        """Return [after - first], tokens of sequences `first` to `after` (exclusive)."""
        return np.array(self.arrays.lengths[first:after], dtype=np.int64)


def _file_state(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns, state.st_ino


def _suggestion(prefix: Path) -> str:
    if prefix.suffix in (".bin", ".idx", ".json") and prefix.with_suffix(".idx").is_file():
        return f"; a dataset is named without its extension: {prefix.with_suffix('')}"
    try:
        names = sorted(entry[:-4] for entry in os.listdir(prefix.parent) if entry.endswith(".idx"))
    except OSError:
        return f"; the folder {prefix.parent} cannot be read"
    near = [name for name in names if name.startswith(prefix.name) or prefix.name.startswith(name)] or names
    if not near:
        return "; make it with ctxlm preprocess"
    return f"; datasets in that folder: {', '.join(near[:5])}"


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
