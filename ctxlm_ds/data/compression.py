"""Open gz, xz, bz2 and zst files as byte streams."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from typing import IO, Any, cast

from ctxlm_ds.errors import DataError

COMPRESSIONS = ("gz", "xz", "bz2", "zst")


class ZstdDamagedError(Exception):
    """A zstd stream cannot be decoded."""


DECOMPRESSION_ERRORS = (EOFError, lzma.LZMAError, zlib.error, ZstdDamagedError)
"""What damaged data raises; gzip and bz2 also raise an OSError without errno."""


def compression_of(path: str) -> str:
    """The compression that a file's name says, or an empty string."""
    extension = path.rsplit(".", 1)[-1].lower()
    return extension if extension in COMPRESSIONS else ""


def open_decompressed(raw: IO[bytes], compression: str, path: str) -> IO[bytes]:
    """The decompressed stream over an open file; `raw.tell()` keeps telling the bytes read from disk.

    Raises DataError where zstd is not installed.
    """
    if compression == "gz":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if compression == "xz":
        return cast("IO[bytes]", lzma.LZMAFile(raw))
    if compression == "bz2":
        return cast("IO[bytes]", bz2.BZ2File(raw))
    if compression == "zst":
        return cast("IO[bytes]", io.BufferedReader(_ZstdReader(raw, path), 1 << 18))
    return raw


class _ZstdReader(io.RawIOBase):
    """zstandard's reader, which takes a file cut short for its end, with that case told apart."""

    def __init__(self, raw: IO[bytes], path: str) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DataError(
                f"{path}: reading zst needs the zstandard package, which is not installed here; "
                "pip install zstandard, or decompress the file first"
            ) from error
        self._raw = raw
        self._error: Any = zstandard.ZstdError
        self._new = lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self._decoder = self._new()
        self._in_frame = False
        self._pending = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            block = self._pending or self._raw.read(1 << 17)
            self._pending = b""
            if not block:
                if self._in_frame:
                    raise ZstdDamagedError("the file ends inside a frame")
                return 0
            self._in_frame = True
            try:
                self._output = memoryview(self._decoder.decompress(block))
            except self._error as error:
                raise ZstdDamagedError(str(error)) from error
            if self._decoder.eof:
                self._pending = self._decoder.unused_data
                self._decoder = self._new()
                self._in_frame = False
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size
