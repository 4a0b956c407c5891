"""One safetensors file of flat fp32 tensors, written tensor by tensor or in one go, and read by byte ranges.

In: 1-D fp32 tensors. Out: a file that any safetensors library reads; ranges of it, straight into a tensor's memory. It
is not mapped, so that a file which is cut off while it is read is an error and not the end of the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ctxlm_ds.checkpoint.manifest import FileEntry
from ctxlm_ds.errors import CheckpointError

if TYPE_CHECKING:
    import torch

FP32_BYTES = 4
LENGTH_BYTES = 8
# The limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000
WRITE_BYTES = 1 << 23
FLUSH_BYTES = 1 << 28


class TensorFile(ABC):
    """The tensors of a safetensors file to be: where each one lies, and the header that says so.

    The format wants its header first; `header_room_bytes` are kept free for it, padded with spaces as it allows.
    """

    def __init__(self, path: Path, header_room_bytes: int) -> None:
        self.path = path
        self._room_bytes = header_room_bytes
        self._entries: dict[str, dict[str, Any]] = {}
        self._data_bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def append(self, key: str, flat: torch.Tensor) -> None:
        """Add one 1-D fp32 tensor on the CPU."""
        self._take(memoryview(flat.numpy()).cast("B"))
        self._entries[key] = {
            "dtype": "F32",
            "shape": [flat.numel()],
            "data_offsets": [self._data_bytes, self._data_bytes + flat.nbytes],
        }
        self._data_bytes += flat.nbytes

    @abstractmethod
    def close(self) -> None:
        """No more tensors come."""

    @abstractmethod
    def _take(self, data: memoryview) -> None:
        """What a kind of file does with a tensor's bytes."""

    def _header(self) -> bytes:
        """All that stands before the tensors; the room grows where it is too small."""
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}, separators=(",", ":")).encode()
        if len(header) > self._room_bytes:
            self._room_bytes = -(-len(header) // 8) * 8
        header = header.ljust(self._room_bytes)
        return len(header).to_bytes(LENGTH_BYTES, "little") + header


class TensorFileWriter(TensorFile):
    """Written tensor by tensor, so that a rank never holds a second copy of what it saves."""

    def __init__(self, path: Path, header_room_bytes: int) -> None:
        super().__init__(path, header_room_bytes)
        self._file: BinaryIO = open(path, "xb")  # noqa: SIM115 (closed by close)
        self._file.seek(LENGTH_BYTES + header_room_bytes)

    def _take(self, data: memoryview) -> None:
        self._file.write(data)

    def close(self) -> None:
        """Write the header; where its room is too small the data moves once."""
        room_bytes = self._room_bytes
        header = self._header()
        if self._room_bytes > room_bytes:
            self._move_data(room_bytes)
        self._file.seek(0)
        self._file.write(header)
        self._file.close()

    def _move_data(self, room_bytes: int) -> None:
        """From behind the narrow room to behind the wide one."""
        self._file.close()
        narrow = self.path.with_name(self.path.name + ".narrow")
        os.replace(self.path, narrow)
        self._file = open(self.path, "xb")  # noqa: SIM115 (closed by close)
        with open(narrow, "rb") as source:
            source.seek(LENGTH_BYTES + room_bytes)
            self._file.seek(LENGTH_BYTES + self._room_bytes)
            shutil.copyfileobj(source, self._file, 1 << 22)
        narrow.unlink()


class PlannedTensorFile(TensorFile):
    """Written in one go from tensors that stay in memory, and flushed and hashed on the way: it is not read back."""

    def __init__(self, path: Path, header_room_bytes: int) -> None:
        super().__init__(path, header_room_bytes)
        self._parts: list[memoryview] = []

    def _take(self, data: memoryview) -> None:
        self._parts.append(data)

    def close(self) -> None:
        """Nothing is open: the file comes into being in `write`."""

    def write(self, check: Callable[[], None]) -> FileEntry:
        """Write the file to the disk.

        Args:
            check: called every few megabytes; what it raises ends the writing.

        Returns:
            Its size and sha256.
        """
        try:
            return self._write(check)
        except OSError as error:
            # Writing, other than opening, does not say which file.
            error.filename = error.filename or str(self.path)
            raise

    def _write(self, check: Callable[[], None]) -> FileEntry:
        digest = hashlib.sha256()
        unflushed_bytes = size_bytes = 0
        with open(self.path, "xb", buffering=0) as file:
            for part in (memoryview(self._header()), *self._parts):
                for start in range(0, part.nbytes, WRITE_BYTES):
                    check()
                    data = part[start : start + WRITE_BYTES]
                    digest.update(data)
                    _write_whole(file, data)
                    size_bytes += data.nbytes
                    unflushed_bytes += data.nbytes
                    if unflushed_bytes >= FLUSH_BYTES:
                        # Whoever else writes is held up where too much waits for the disk.
                        os.fdatasync(file.fileno())
                        unflushed_bytes = 0
            os.fsync(file.fileno())
        return FileEntry(size_bytes, digest.hexdigest())


def _write_whole(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


class TensorFileReader:
    """Reads ranges of the flat fp32 tensors of a safetensors file.

    Its header is read once; the file itself may be closed and opened again between reads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._places: dict[str, Any] | None = None

    def open(self) -> None:
        """Open the file, and the first time read where its tensors lie.

        Raises:
            CheckpointError: no such file, or not one of this format.
        """
        try:
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 (closed by close)
            if self._places is None:
                self._places = _read_header(self._file)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: missing; verify the checkpoint or use the one before it") from None
        except (OSError, ValueError, RecursionError) as error:
            self.close()
            raise CheckpointError(f"{self.path}: cannot read its header ({error})") from None

    def close(self) -> None:
        """Give the file handle back."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def read_into(self, key: str, length: int, first: int, target: torch.Tensor) -> None:
        """Fill 1-D contiguous fp32 `target` on the CPU with the tensor's elements from `first` on; the file is open.

        Args:
            key: name of the tensor.
            length: the elements it must have.
            first: first element to read.
            target: as long as what is read.

        Raises:
            CheckpointError: the file is damaged, or holds no such tensor.
        """
        assert self._file is not None
        start = self._place(key, length) + first * FP32_BYTES
        room = memoryview(target.numpy()).cast("B")
        try:
            self._file.seek(start)
            while room:
                count = self._file.readinto(room)
                if not count:
                    raise CheckpointError(f"{self.path}: cannot read {key} (the file ends too early)")
                room = room[count:]
        except (OSError, OverflowError) as error:
            raise CheckpointError(f"{self.path}: cannot read {key} ({error})") from None

    def _place(self, key: str, length: int) -> int:
        """Where the tensor begins in the file, in bytes."""
        place = (self._places or {}).get(key)
        if place is None:
            raise CheckpointError(f"{self.path}: cannot read {key} (no such tensor)")
        if not isinstance(place, tuple):
            raise CheckpointError(f"{self.path}: cannot read {key} (it is {place!r:.80}, not flat F32)")
        start, found = place
        if found != length:
            raise CheckpointError(f"{self.path}: {key} is F32 [{found}], the index says F32 [{length}]")
        return start


def _read_header(file: FileIO) -> dict[str, Any]:
    """First byte and number of elements of each flat fp32 tensor; of anything else, what the header says.

    Raises ValueError where the file has no header of the format.
    """
    size_bytes = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if header_bytes > min(MAX_HEADER_BYTES, size_bytes - LENGTH_BYTES):
        raise ValueError(f"{size_bytes} bytes, too short for a header of {header_bytes}")
    entries = json.loads(file.read(header_bytes))
    if not isinstance(entries, dict):
        raise ValueError("not an object")
    return {key: _flat_place(entry, LENGTH_BYTES + header_bytes) or entry for key, entry in entries.items()}


def _flat_place(entry: Any, data_start: int) -> tuple[int, int] | None:
    if not isinstance(entry, dict) or entry.get("dtype") != "F32":
        return None
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not _are_integers(shape, 1) or not _are_integers(offsets, 2):
        return None
    (length,), (first, last) = shape, offsets
    return (data_start + first, length) if first >= 0 and last - first == length * FP32_BYTES else None


def _are_integers(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(type(value) is int for value in values)
