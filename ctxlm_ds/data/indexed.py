"""Megatron's indexed dataset, `.bin` and `.idx`: an exact, memory-mapped reader.

`.bin` is all tokens, one after another. `.idx` (little-endian, unaligned): magic, u64 version 1, u8 dtype code, u64 N
sequences, u64 D = documents + 1, int32[N] lengths, int64[N] byte offsets, int64[D] first sequence of each document.
Source: megatron/core/datasets/indexed_dataset.py. Everything is checked before anything is mapped: a damaged or foreign
file raises DataError. Not here: writing (indexed_writer.py), the slow checks of `--verify` (inspect.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from functools import cached_property
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
METADATA_FORMAT = "ctxlm_ds-dataset"
METADATA_VERSION = 1
_CHECK_ITEMS = 1 << 20


def dataset_file(prefix: str | Path, extension: str) -> Path:
    """`PREFIX.bin`, `PREFIX.idx` or `PREFIX.json`."""
    return Path(f"{prefix}.{extension}")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Megatron's choice: uint16 below 65,500 tokens, else int32."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


class IndexedDataset:
    """One dataset, opened by its prefix (the path without .bin/.idx). Safe to open in several processes."""

    def __init__(self, prefix: str | Path) -> None:
        """Raises DataError where a file is missing, cut, of another format, or the two do not belong together."""
        self.prefix = str(prefix)
        idx_path, bin_path = dataset_file(prefix, "idx"), dataset_file(prefix, "bin")
        for path in (idx_path, bin_path):
            if not path.is_file():
                raise DataError(f"{path}: no such file{_suggestion(Path(self.prefix))}")
        self._idx_bytes, self._bin_bytes = idx_path.stat().st_size, bin_path.stat().st_size
        self.dtype, self.num_sequences, self.num_documents = self._read_header(idx_path)
        self._idx = np.memmap(idx_path, dtype=np.uint8, mode="r")
        self.num_tokens = self._check_sequences(idx_path, bin_path)
        self._check_documents(idx_path)
        self.tokens: NDArray[Any] = np.empty(0, self.dtype)
        """Flat tokens of the whole dataset, memory-mapped."""
        if self._bin_bytes:
            self.tokens = np.memmap(bin_path, dtype=self.dtype, mode="r")
        self.metadata = self._read_metadata()

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return IndexedDataset, (self.prefix,)

    def _read_header(self, path: Path) -> tuple[np.dtype[Any], int, int]:
        with open(path, "rb") as file:
            head = file.read(HEADER.size)
        if head.startswith(LEGACY_MAGIC):
            raise DataError(
                f"{path}: Megatron-DeepSpeed's old lazy/cached format (magic TNTIDX); preprocess the text again, or "
                "convert it there with --dataset-impl mmap"
            )
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise DataError(f"{path}: not an indexed dataset (it begins with {head[:9]!r}, {self._idx_bytes} bytes)")
        _, version, code, num_sequences, num_indices = HEADER.unpack(head)
        if version != VERSION:
            raise DataError(f"{path}: version {version} of the format, only {VERSION} is known; it may be damaged")
        expected = HEADER.size + 12 * num_sequences + 8 * num_indices
        if self._idx_bytes != expected:
            self._raise_wrong_size(path, expected, num_sequences)
        if code not in DTYPES:
            raise DataError(f"{path}: dtype code {code} is not one of 1 to 8; the file is damaged")
        if DTYPES[code].kind == "f":
            raise DataError(f"{path}: holds {DTYPES[code].name} values, not token ids")
        if num_indices == 0:
            raise DataError(f"{path}: has no document index (not even its leading 0); the file is damaged")
        return DTYPES[code], num_sequences, num_indices - 1

    def _raise_wrong_size(self, path: Path, expected: int, num_sequences: int) -> None:
        # fairseq writes the same magic and version, N at 18, and no document index: 26 bytes of header.
        if self._idx_bytes == 26 + 12 * num_sequences:
            raise DataError(
                f"{path}: fairseq's dataset format, which has Megatron's magic number but no document index; "
                "preprocess the original text with tools/preprocess_data.py"
            )
        if self._idx_bytes == expected + num_sequences:
            raise DataError(f"{path}: a multimodal dataset (it has a mode for each sequence); only text is supported")
        raise DataError(
            f"{path}: {self._idx_bytes} bytes where its header asks for {expected}; the file is cut short or damaged, "
            "copy or make it again"
        )

    def _array(self, dtype: str, offset: int, count: int) -> NDArray[Any]:
        item = np.dtype(dtype)
        return self._idx[offset : offset + count * item.itemsize].view(item)

    @property
    def _lengths_view(self) -> NDArray[Any]:
        return self._array("<i4", HEADER.size, self.num_sequences)

    @property
    def _pointers_view(self) -> NDArray[Any]:
        return self._array("<i8", HEADER.size + 4 * self.num_sequences, self.num_sequences)

    @property
    def _documents_view(self) -> NDArray[Any]:
        return self._array("<i8", HEADER.size + 12 * self.num_sequences, self.num_documents + 1)

    def _check_sequences(self, idx_path: Path, bin_path: Path) -> int:
        """The number of tokens, once lengths and offsets are known to describe a gapless .bin of the right size."""
        lengths, pointers = self._lengths_view, self._pointers_view
        total = 0
        for first in range(0, self.num_sequences, _CHECK_ITEMS):
            part = lengths[first : first + _CHECK_ITEMS].astype(np.int64)
            if part.min() < 0:
                negative = first + int(part.argmin())
                raise DataError(f"{idx_path}: sequence {negative} has a negative length; the file is damaged")
            ends = total + np.cumsum(part)
            wrong = np.flatnonzero(pointers[first : first + _CHECK_ITEMS] != (ends - part) * self.dtype.itemsize)
            if wrong.size:
                raise DataError(
                    f"{idx_path}: the offset of sequence {first + int(wrong[0])} does not follow from the lengths "
                    "before it; the file is damaged, or its sequences do not lie one after another"
                )
            total = int(ends[-1])
        expected = total * self.dtype.itemsize
        if self._bin_bytes != expected:
            raise DataError(self._wrong_bin_size(bin_path, expected))
        return total

    def _wrong_bin_size(self, bin_path: Path, expected: int) -> str:
        filled_documents = int(np.count_nonzero(np.diff(self._documents_view)))
        extra = self._bin_bytes - expected
        if extra > 0 and extra == filled_documents * self.dtype.itemsize:
            return (
                f"{bin_path}: one token more for each of its {filled_documents} documents than the .idx counts: "
                "written by a preprocess_data.py that left end-of-document tokens out of the lengths "
                "(Megatron-DeepSpeed --append-eod): all documents but the first are shifted; preprocess the text again"
            )
        return (
            f"{bin_path}: {self._bin_bytes} bytes where the index asks for {expected}; it is cut short, or belongs to "
            "another .idx; copy or make it again"
        )

    def _check_documents(self, idx_path: Path) -> None:
        indices = self._documents_view
        if indices[0] != 0 or indices[-1] != self.num_sequences:
            raise DataError(
                f"{idx_path}: the document index runs from {indices[0]} to {indices[-1]} where 0 to "
                f"{self.num_sequences} (its number of sequences) is needed; the file is damaged or was not finished"
            )
        for first in range(0, self.num_documents, _CHECK_ITEMS):
            if np.any(np.diff(indices[first : first + _CHECK_ITEMS + 1]) < 0):
                raise DataError(f"{idx_path}: the document index goes backwards; the file is damaged")

    def _read_metadata(self) -> dict[str, Any] | None:
        path = dataset_file(self.prefix, "json")
        if not path.is_file():
            return None
        try:
            metadata = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise DataError(f"{path}: not valid JSON ({error}); restore it") from error
        if not isinstance(metadata, dict) or metadata.get("format") != METADATA_FORMAT:
            raise DataError(f"{path}: does not describe a dataset of this project; move it away or restore it")
        if metadata.get("version") != METADATA_VERSION:
            raise DataError(f"{path}: version {metadata.get('version')}, only {METADATA_VERSION} is known here")
        present = {
            "sequences": self.num_sequences,
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "dtype": self.dtype.name,
        }
        for key, value in present.items():
            if metadata.get(key) != value:
                raise DataError(
                    f"{path}: says {key} {metadata.get(key)!r}, the files hold {value!r}; they do not belong together, "
                    "preprocess the text again"
                )
        return metadata

    @cached_property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """[N], tokens of each sequence, an aligned copy made at first use."""
        return np.array(self._lengths_view, dtype=np.int32)

    @cached_property
    def document_indices(self) -> NDArray[np.int64]:
        """[documents + 1], document i is sequences [i] to [i + 1]; an aligned copy made at first use."""
        return np.array(self._documents_view, dtype=np.int64)

    @cached_property
    def sequence_starts(self) -> NDArray[np.int64]:
        """[N + 1], offset in `tokens` of each sequence and the end; made at first use."""
        starts = np.empty(self.num_sequences + 1, dtype=np.int64)
        np.floor_divide(self._pointers_view, self.dtype.itemsize, out=starts[:-1])
        starts[-1] = self.num_tokens
        return starts

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of the .idx, the size of .bin and, where a JSON stands beside them, its checksums."""
        digest = hashlib.sha256(f"{METADATA_FORMAT} {self._bin_bytes}".encode())
        digest.update(self._idx.data)
        if self.metadata is not None:
            checksums = {key: self.metadata.get(key) for key in ("sha256", "tokenizer_fingerprint", "split_sentences")}
            digest.update(json.dumps(checksums, sort_keys=True).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return self.num_sequences

    def sequence(self, index: int) -> NDArray[Any]:
        """[n], the tokens of one sequence (a view of the file)."""
        return self.tokens[self.sequence_starts[index] : self.sequence_starts[index + 1]]

    def document(self, index: int) -> Iterator[NDArray[Any]]:
        """The sequences of one document."""
        for sequence in range(self.document_indices[index], self.document_indices[index + 1]):
            yield self.sequence(sequence)

    def verify(self) -> list[str]:
        """Read every byte and prove the dataset whole; the proofs in words. Raises DataError at the first failure."""
        from ctxlm_ds.data.verify import verify_dataset

        return verify_dataset(self)


def _suggestion(prefix: Path) -> str:
    """Names of datasets that the user may have meant."""
    if prefix.suffix in (".bin", ".idx", ".json") and prefix.with_suffix(".idx").is_file():
        return f"; a dataset is named without its extension: {prefix.with_suffix('')}"
    try:
        names = sorted(entry[:-4] for entry in os.listdir(prefix.parent) if entry.endswith(".idx"))
    except OSError:
        return f"; the folder {prefix.parent} cannot be read"
    near = [name for name in names if name.startswith(prefix.name) or prefix.name.startswith(name)] or names
    if not near:
        return "; make it with tools/preprocess_data.py"
    return f"; datasets there: {', '.join(near[:5])}"
