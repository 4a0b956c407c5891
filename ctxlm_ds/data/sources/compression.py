"""Decompress gz, xz, bz2 and zst files as byte streams of bounded memory.

A stream ends at damage instead of raising, so that nothing before it is lost, and records the damage and the position
on disk of its bytes. The standard library's file objects would end silently at a damaged header of a later member.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections import deque
from typing import IO, Any, Protocol

import zstandard

COMPRESSIONS = ("gz", "xz", "bz2", "zst")

BLOCK_BYTES = 1 << 16
"""Read from disk at a time. `disk_offset` gives multiples of it."""
_OUTPUT_BYTES = 1 << 18
_ZSTD_INPUT_BYTES = 1 << 11
"""zstandard's decoder has no bound on what it returns; four bytes can become 128 KB."""
_XZ_MEMORY_BYTES = 1 << 30
"""Dictionaries up to a gigabyte (xz -9 uses 64 MB)."""
_ZSTD_WINDOW_BYTES = 1 << 31
"""zstd --long=31, as large dumps use it."""


class _Damaged(Exception):
    """The data cannot be decoded."""


class _Decoder(Protocol):
    """One compressed member (gzip member, xz stream, zstd frame)."""

    eof: bool

    def step(self, data: memoryview) -> tuple[bytes, memoryview, bool]:
        """Return output, the input that is left, and True if output is still pending. Raises _Damaged."""


class _GzipMember:
    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=31)
        self.eof = False

    def step(self, data: memoryview) -> tuple[bytes, memoryview, bool]:
        try:
            output = self._decoder.decompress(data, _OUTPUT_BYTES)
        except zlib.error as error:
            raise _Damaged(str(error)) from error
        self.eof = self._decoder.eof
        rest = self._decoder.unused_data if self.eof else self._decoder.unconsumed_tail
        return output, memoryview(rest), not self.eof and len(output) == _OUTPUT_BYTES


class _BufferedMember:
    """xz and bz2, whose decoders keep unused input."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.eof = False

    def step(self, data: memoryview) -> tuple[bytes, memoryview, bool]:
        try:
            output = self._decoder.decompress(data, _OUTPUT_BYTES)
        except (lzma.LZMAError, OSError, ValueError) as error:
            raise _Damaged(str(error)) from error
        self.eof = self._decoder.eof
        rest = self._decoder.unused_data if self.eof else b""
        return output, memoryview(rest), not self.eof and not self._decoder.needs_input


class _ZstdFrame:
    def __init__(self) -> None:
        self._decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
        self.eof = False

    def step(self, data: memoryview) -> tuple[bytes, memoryview, bool]:
        try:
            output = self._decoder.decompress(data[:_ZSTD_INPUT_BYTES])
        except zstandard.ZstdError as error:
            raise _Damaged(str(error)) from error
        self.eof = self._decoder.eof
        taken = min(len(data), _ZSTD_INPUT_BYTES) - (len(self._decoder.unused_data) if self.eof else 0)
        return output, data[taken:], False


def compression_of(path: str) -> str:
    """Return the compression that a file's name says, or an empty string."""
    extension = path.rsplit(".", 1)[-1].lower()
    return extension if extension in COMPRESSIONS else ""


class Decompressor(io.RawIOBase):
    """Decompressed bytes of an open file, all members."""

    def __init__(self, raw: IO[bytes], compression: str) -> None:
        self.damage = ""
        """Description of the damage, once the part before it is read; empty for none."""
        self._raw = raw
        self._compression = compression
        self._decoder: _Decoder | None = None
        self._input = memoryview(b"")
        self._output = memoryview(b"")
        self._pending = False
        self._produced = 0
        self._consumed = 0
        self._blocks: deque[tuple[int, int]] = deque()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if self.damage or not self._fill():
                return 0
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size

    def disk_offset(self, position: int) -> int:
        """Return where the disk block begins that gave byte `position` of the output; positions must not decrease."""
        while len(self._blocks) > 1 and self._blocks[1][0] <= position:
            self._blocks.popleft()
        return self._blocks[0][1] if self._blocks else 0

    def _fill(self) -> bool:
        """Decode a little more. Returns False at the end of the file or at damage."""
        if not self._input and not self._pending and not self._read_block():
            return False
        try:
            if self._decoder is None:
                self._decoder = self._next_member()
            if self._decoder is not None:
                output, self._input, self._pending = self._decoder.step(self._input)
                self._output = memoryview(output)
                self._produced += len(output)
                if self._decoder.eof:
                    self._decoder = None
        except _Damaged as error:
            self.damage = str(error)
        return True

    def _read_block(self) -> bool:
        block = self._raw.read(BLOCK_BYTES)
        if not block:
            if self._decoder is not None:
                self.damage = "the file ends too early"
            elif not self._consumed:
                self.damage = "the file is empty"
            return False
        self._blocks.append((self._produced, self._consumed))
        self._consumed += len(block)
        self._input = memoryview(block)
        return True

    def _next_member(self) -> _Decoder | None:
        """Return a decoder for the next member; None for padding (gzip and xz allow zeros between members)."""
        if self._compression in ("gz", "xz") and self._produced:
            self._input = memoryview(bytes(self._input).lstrip(b"\0"))
            if not self._input:
                return None
        if self._compression == "gz":
            return _GzipMember()
        if self._compression == "xz":
            return _BufferedMember(lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES))
        if self._compression == "bz2":
            return _BufferedMember(bz2.BZ2Decompressor())
        return _ZstdFrame()
