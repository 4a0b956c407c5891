"""Read Megatron's indexed dataset, `.bin` and `.idx`, memory-mapped.

`.bin` is all tokens, one after another; `.idx` says where sequences and documents begin (index_file.py). Everything is
checked before anything is taken: a damaged or foreign file raises DataError. The slow checks are in inspection.py.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.dataset.index_file import check_index, read_index
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
            deciding = {key: self.metadata.get(key) for key in _DECIDING}
            digest.update(json.dumps(deciding, sort_keys=True).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return self.num_sequences

    def sequence(self, index: int) -> NDArray[Any]:
        """Return [n], the tokens of one sequence (a view of the file)."""
        start = int(self.arrays.offsets[index]) // self.arrays.token_offset
        return self.tokens[start : start + int(self.arrays.lengths[index])]

    def document(self, index: int) -> Iterator[NDArray[Any]]:
        """Yield the sequences of one document."""
        for sequence in range(int(self.arrays.documents[index]), int(self.arrays.documents[index + 1])):
            yield self.sequence(sequence)

    def document_sequences(self, first: int, after: int) -> NDArray[np.int64]:
        """Return [after - first], sequences of documents `first` to `after` (exclusive)."""
        return np.diff(self.arrays.documents[first : after + 1])

    def document_tokens(self, first: int, after: int) -> NDArray[np.int64]:
        """Return [after - first], tokens of documents `first` to `after` (exclusive)."""
        return np.diff(self.first_tokens(self.arrays.documents[first : after + 1]))

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
