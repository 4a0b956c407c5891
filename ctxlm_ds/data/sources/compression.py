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
from collections.abc import Callable
from typing import IO, Any

import zstandard

BLOCK_BYTES = 1 << 16
"""Read from disk at a time. `disk_offset` gives multiples of it."""
_OUTPUT_BYTES = 1 << 18
_ZSTD_INPUT_BYTES = 1 << 11
"""zstandard's decoder has no bound on what it returns; four bytes can become 128 KB."""
_XZ_MEMORY_BYTES = 1 << 30
"""Dictionaries up to a gigabyte (xz -9 uses 64 MB)."""
_ZSTD_WINDOW_BYTES = 1 << 31
"""zstd --long=31, as large dumps use it."""


_DAMAGE = (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, ValueError)
"""Raised by the decoders for data that they cannot decode."""
_DECODERS: dict[str, Callable[[], Any]] = {
    "gz": lambda: zlib.decompressobj(wbits=31),
    "xz": lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES),
    "bz2": bz2.BZ2Decompressor,
    "zst": lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj(),
}


def _step(compression: str, decoder: Any, data: memoryview) -> tuple[bytes, memoryview, bool]:
    """Return output, the input that is left, and True if output is still pending. Raises what is in _DAMAGE."""
    if compression == "zst":
        output = decoder.decompress(data[:_ZSTD_INPUT_BYTES])
        taken = min(len(data), _ZSTD_INPUT_BYTES) - (len(decoder.unused_data) if decoder.eof else 0)
        return output, data[taken:], False
    output = decoder.decompress(data, _OUTPUT_BYTES)
    if decoder.eof:
        return output, memoryview(decoder.unused_data), False
    if compression == "gz":
        return output, memoryview(decoder.unconsumed_tail), len(output) == _OUTPUT_BYTES
    return output, memoryview(b""), not decoder.needs_input  # xz and bz2 keep unused input


def compression_of(path: str) -> str:
    """Return the compression that a file's name says, or an empty string."""
    extension = path.rsplit(".", 1)[-1].lower()
    return extension if extension in _DECODERS else ""


class Decompressor(io.RawIOBase):
    """Decompressed bytes of an open file, all members."""

    def __init__(self, raw: IO[bytes], compression: str) -> None:
        self.damage = ""
        """Description of the damage, once the part before it is read; empty for none."""
        self._raw = raw
        self._compression = compression
        self._decoder: Any = None
        """Of one member: gzip member, xz or bz2 stream, zstd frame."""
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
                output, self._input, self._pending = _step(self._compression, self._decoder, self._input)
                self._output = memoryview(output)
                self._produced += len(output)
                if self._decoder.eof:
                    self._decoder = None
        except _DAMAGE as error:
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

    def _next_member(self) -> Any:
        """Return a decoder for the next member; None for padding (gzip and xz allow zeros between members)."""
        if self._compression in ("gz", "xz") and self._produced:
            self._input = memoryview(bytes(self._input).lstrip(b"\0"))
            if not self._input:
                return None
        return _DECODERS[self._compression]()
