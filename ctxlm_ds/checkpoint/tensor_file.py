"""One safetensors file: written in a single pass from tensors read one at a time, and read by ranges of bytes.

Files are not mapped, so that one which is cut off while it is read is an error and does not end the process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ctxlm_ds.checkpoint.manifest import FileEntry
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.untrusted_json import open_regular

if TYPE_CHECKING:
    import torch

FP32_BYTES = 4
CODE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes per element by the format's name of a data type."""
LENGTH_BYTES = 8
ALIGNMENT = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
WRITE_BYTES = 1 << 23
FLUSH_BYTES = 1 << 28


class LazyTensor(NamedTuple):
    """A tensor that is made when it is written."""

    length: int
    read: Callable[[], torch.Tensor]
    """Returns the elements, of any shape."""


class TensorFileWriter:
    """The tensors of a safetensors file, listed first, then written together; `code` names their data type."""

    def __init__(self, path: Path, code: str = "F32") -> None:
        self.path = path
        self._code = code
        self._entries: dict[str, dict[str, Any]] = {}
        self._reads: list[Callable[[], torch.Tensor]] = []
        self._data_bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def add(self, key: str, shape: Sequence[int], read: Callable[[], torch.Tensor]) -> None:
        """List a tensor of `shape`, which `read` returns on the CPU in the file's data type."""
        end = self._data_bytes + math.prod(shape) * CODE_BYTES[self._code]
        self._entries[key] = {"dtype": self._code, "shape": list(shape), "data_offsets": [self._data_bytes, end]}
        self._data_bytes = end
        self._reads.append(read)

    def write(self, check: Callable[[], None] = lambda: None) -> FileEntry:
        """Write, flush and hash the file, with one tensor in memory at a time.

        `check` is called every few megabytes; what it raises ends the writing. An OSError has the file's name.
        """
        digest = hashlib.sha256()
        unflushed_bytes = size_bytes = 0
        try:
            with open(self.path, "xb", buffering=0) as file:
                for block in self._blocks():
                    check()
                    digest.update(block)
                    size_bytes += len(block)
                    unflushed_bytes += len(block)
                    while block:
                        block = block[file.write(block) :]
                    if unflushed_bytes >= FLUSH_BYTES:
                        # Too much unwritten data would hold up everything else that writes to the disk.
                        os.fdatasync(file.fileno())
                        unflushed_bytes = 0
                os.fsync(file.fileno())
        except OSError as error:
            # Only opening names the file in its error.
            error.filename = error.filename or str(self.path)
            raise
        return FileEntry(size_bytes, digest.hexdigest())

    def _blocks(self) -> Iterator[memoryview]:
        """Yield the header and the tensors' bytes, a few megabytes at a time."""
        import torch

        header = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % ALIGNMENT)
        data = (memoryview(read().contiguous().view(-1).view(torch.uint8).numpy()) for read in self._reads)
        for part in chain([memoryview(len(header).to_bytes(LENGTH_BYTES, "little") + header)], data):
            for start in range(0, part.nbytes, WRITE_BYTES):
                yield part[start : start + WRITE_BYTES]


class TensorFileReader:
    """Reader of ranges of the flat fp32 tensors of a safetensors file; each read opens the file.

    Raises CheckpointError if there is no such file, or it is not of this format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                self._entries = _read_header(file)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing; verify the checkpoint or use the one before it") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: cannot read its header ({error})") from None

    def find(self, key: str, length: int) -> int:
        """Return the first byte of a tensor; raise CheckpointError if the file has none of this name and length."""
        entry = self._entries.get(key)
        if entry is None:
            raise CheckpointError(f"{self.path}: cannot read {key} (the file has no flat F32 tensor of this name)")
        start, found = entry
        if found != length:
            raise CheckpointError(
                f"{self.path}: cannot read {key} (it is F32 [{found}], the index says F32 [{length}])"
            )
        return start

    def read_into(self, key: str, length: int, first: int, target: torch.Tensor) -> None:
        """Fill 1-D contiguous fp32 `target` on the CPU with elements of a tensor, from `first` on.

        Raises CheckpointError if the file is damaged, or holds no such tensor of `length` elements.
        """
        start = self.find(key, length) + first * FP32_BYTES
        buffer = memoryview(target.numpy()).cast("B")
        try:
            with open_regular(self.path) as file:
                file.seek(start)
                if file.readinto(buffer) != len(buffer):
                    raise CheckpointError(f"{self.path}: cannot read {key} (the file ends too early)")
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot read {key} ({error})") from None


def _read_header(file: BufferedReader) -> dict[str, tuple[int, int]]:
    """Return (first byte, number of elements) of each flat fp32 tensor; raise ValueError if there is no header."""
    size_bytes = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if header_bytes > min(MAX_HEADER_BYTES, size_bytes - LENGTH_BYTES):
        raise ValueError(f"{size_bytes} bytes, too short for a header of {header_bytes}")
    entries = json.loads(file.read(header_bytes))
    if not isinstance(entries, dict):
        raise ValueError("not an object")
    data_start = LENGTH_BYTES + header_bytes
    found: dict[str, tuple[int, int]] = {}
    for key, entry in entries.items():
        with suppress(KeyError, TypeError, ValueError):
            (length,), (first, last) = entry["shape"], entry["data_offsets"]
            is_flat = entry["dtype"] == "F32" and {type(length), type(first), type(last)} == {int}
            if is_flat and 0 <= first == last - length * FP32_BYTES and last <= size_bytes - data_start:
                found[key] = (data_start + first, length)
    return found
