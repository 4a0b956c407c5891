"""The bytes of a joined dataset: files appended to one another and hashed on the way, and the .idx of the whole.

In: parts (merge_inputs.py), an open output. Out: its bytes and their sha256. Memory: a few blocks. Not here: names, the
JSON, publishing (merge.py).
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.console import ByteProgress
from ctxlm_ds.data.dataset.checksums import check_digest
from ctxlm_ds.data.dataset.index_file import DTYPES, HEADER, MAGIC, VERSION
from ctxlm_ds.data.dataset.merge_inputs import Part
from ctxlm_ds.errors import DataError

_BLOCK_BYTES = 1 << 20
"""What is read, hashed twice and written while it is in the processor's cache: blocks of 4 MB took 4 times as long."""
_NUM_BUFFERS = 4
_FLUSH_BYTES = 1 << 28
_INDEX_ITEMS = 1 << 19


class Joiner:
    """Appends files to one. The whole and each part are hashed in two threads, flushed in a third, while it copies."""

    def __init__(self, path: Path, progress: ByteProgress) -> None:
        self.bytes_written = 0
        self._progress = progress
        self._whole = hashlib.sha256()
        self._free = [memoryview(bytearray(_BLOCK_BYTES)) for _ in range(_NUM_BUFFERS)]
        self._in_use: deque[tuple[memoryview, list[Future[None]]]] = deque()
        self._checks: deque[Future[None]] = deque()
        self._flushed: Future[None] | None = None
        self._flushed_bytes = 0
        self._resources = ExitStack()
        self._out = self._resources.enter_context(open(path, "wb", buffering=0))  # noqa: SIM115 (closed in __exit__)
        self._whole_thread, self._part_thread, self._flush_thread = (
            self._resources.enter_context(ThreadPoolExecutor(1)) for _ in range(3)
        )

    def __enter__(self) -> Joiner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def append(self, path: Path, num_bytes: int, recorded: Sequence[tuple[Path, str]]) -> None:
        """Copy a file of `num_bytes`; `recorded` are its checksums and where they stand.

        Raises DataError where the file ends early. A wrong checksum is raised here or, at the latest, by `finish`.
        """
        # The hash of the whole is that of its first part until the second begins.
        is_first = self.bytes_written == 0
        digest = self._whole if is_first else hashlib.sha256()
        thread = self._whole_thread if is_first else self._part_thread
        left = num_bytes
        with open(path, "rb", buffering=0) as source:
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while left:
                buffer = self._free_buffer()
                count = source.readinto(buffer[: min(left, _BLOCK_BYTES)])
                if not count:
                    raise DataError(f"{path}: ends {left} bytes early; it was changed while it was being joined")
                block = buffer[:count]
                hashed = [self._whole_thread.submit(self._whole.update, block)]
                if recorded and not is_first:
                    hashed.append(self._part_thread.submit(digest.update, block))
                self._in_use.append((buffer, hashed))
                self._write(block)
                left -= count
        for where, expected in recorded:
            self._checks.append(thread.submit(_check, path, digest, expected, where))

    def finish(self) -> str:
        """sha256 (hex) of everything. Raises DataError where a part was not what its checksum says."""
        for check in self._checks:
            check.result()
        self._whole_thread.submit(lambda: None).result()
        if self._flushed is not None:
            self._flushed.result()
        return self._whole.hexdigest()

    def _free_buffer(self) -> memoryview:
        while self._checks and self._checks[0].done():
            self._checks.popleft().result()
        if self._free:
            return self._free.pop()
        buffer, hashed = self._in_use.popleft()
        wait(hashed)
        return buffer

    def _write(self, block: memoryview) -> None:
        while block:
            block = block[self._out.write(block) :]
        self.bytes_written = self._out.tell()
        self._progress.update(self.bytes_written)
        # Left alone, the kernel holds back gigabytes and writes them while the final flush waits.
        if self.bytes_written - self._flushed_bytes >= _FLUSH_BYTES and (self._flushed is None or self._flushed.done()):
            self._flushed_bytes = self.bytes_written
            self._flushed = self._flush_thread.submit(os.fdatasync, self._out.fileno())


def _check(path: Path, digest: Any, expected: str, where: Path) -> None:
    check_digest(path, digest.hexdigest(), expected, where)


def index_bytes(parts: Sequence[Part]) -> int:
    """Size of the joined .idx."""
    sequences, documents = sum(part.num_sequences for part in parts), sum(part.num_documents for part in parts)
    return HEADER.size + 12 * sequences + 8 * (documents + 1)


def index_blocks(parts: Sequence[Part]) -> Iterator[bytes]:
    """The joined .idx in blocks, always as MMIDIDX."""
    dtype = parts[0].dtype
    code = next(code for code, known in DTYPES.items() if known == dtype)
    sequences, documents = sum(part.num_sequences for part in parts), sum(part.num_documents for part in parts)
    yield HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1)
    for part in parts:
        for lengths in _blocks(part.open().arrays.lengths):
            yield lengths.astype("<i4").tobytes()
    before = 0
    for part in parts:
        arrays = part.open().arrays
        for offsets in _blocks(arrays.offsets):
            yield ((offsets // arrays.token_offset + before) * dtype.itemsize).astype("<i8").tobytes()
        before += part.num_tokens
    yield bytes(8)
    before = 0
    for part in parts:
        for ends in _blocks(part.open().arrays.documents[1:]):
            yield (ends + before).astype("<i8").tobytes()
        before += part.num_sequences


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[np.int64]]:
    for first in range(0, len(array), _INDEX_ITEMS):
        yield array[first : first + _INDEX_ITEMS].astype(np.int64)


def digest_of(blocks: Iterable[bytes]) -> str:
    """sha256 (hex) of blocks one after another."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()
