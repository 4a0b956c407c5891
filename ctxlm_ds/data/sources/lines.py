"""Read files of lines (text, jsonl, WikiExtractor output) as chunks of complete records, without parsing the lines.

The end of a chunk depends on its bytes only, so a resumed run cuts in the same positions. Files may be gz, xz, bz2 or
zst: byte streams of bounded memory. A stream ends at damage instead of raising, so that nothing before it is lost, and
records the damage and the position on disk of its bytes. The standard library's file objects would end silently at a
damaged header of a later member.
"""

from __future__ import annotations

import bz2
import io
import lzma
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO, Any

import zstandard

from ctxlm_ds.data.sources.types import EXCERPT_BYTES, MAX_RECORD_BYTES, BadRecord, Chunk, Position, Source

MAX_TEXT_DOCUMENT_BYTES = 64 << 20
"""A text document without any blank line, or a file as one document, is cut at the next line end beyond this."""
DOC_END = b"</doc>"
_PART_BYTES = 1 << 20
"""Most bytes of a line read at a time."""
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


def read_lines(source: Source, span: range, chunk_bytes: int, after: Position | None) -> Iterator[Chunk]:
    """Yield the chunks of `source` that belong to `span`. Raises the disk's OSError.

    Of an uncompressed file these are the records between the record ends that follow span.start and span.stop, of a
    compressed one the chunks that begin in blocks of the span.
    """
    read = _read_compressed if source.compression else _read_seekable
    with open(source.path, "rb") as raw:
        yield from read(source, raw, span, chunk_bytes, after)


def _read_seekable(
    source: Source, raw: IO[bytes], span: range, chunk_bytes: int, after: Position | None
) -> Iterator[Chunk]:
    size = os.fstat(raw.fileno()).st_size
    end = _record_end(raw, source.format, span.stop, size)
    if after is None:
        start = _record_end(raw, source.format, span.start, size)
        after = Position(0, start, -1 if start else 0)
    raw.seek(after.offset)
    cutter = _Cutter(source, raw, after)
    while cutter.offset < end and (chunk := cutter.next(min(chunk_bytes, end - cutter.offset))) is not None:
        yield chunk


def _read_compressed(
    source: Source, raw: IO[bytes], span: range, chunk_bytes: int, after: Position | None
) -> Iterator[Chunk]:
    decompressor = Decompressor(raw, source.compression)
    stream = io.BufferedReader(decompressor, 1 << 18)
    after = after or Position()
    left = after.offset
    while left and (skipped := stream.read(min(left, _PART_BYTES))):
        left -= len(skipped)
    cutter = _Cutter(source, stream, after, decompressor)
    while (chunk := cutter.next(chunk_bytes)) is not None and chunk.bytes_read < span.stop:
        if chunk.bytes_read >= span.start:
            yield chunk


def _record_end(stream: IO[bytes], format: str, offset: int, size: int) -> int:
    """Return the first offset, at or behind `offset`, at which a record surely ends."""
    if offset <= 0 or offset >= size:
        return max(0, min(offset, size))
    stream.seek(offset - 1)
    place = offset - 1 + _skip_line(stream)[1]
    is_end = format in ("jsonl", "lines:1")
    while not is_end and place < size:
        head, num_bytes = _skip_line(stream)
        place += num_bytes
        is_end = len(head) == num_bytes and _ends_record(format, head)
    return min(place, size)


def _skip_line(stream: IO[bytes]) -> tuple[bytes, int]:
    """Skip the rest of a line in bounded memory. Returns its beginning and its number of bytes."""
    head = part = stream.readline(_PART_BYTES)
    size = len(part)
    while part and not part.endswith(b"\n"):
        part = stream.readline(_PART_BYTES)
        size += len(part)
    return head, size


def _ends_record(format: str, line: bytes | bytearray, number: int = 1) -> bool:
    """Return whether a line ends a record; `number` counts the lines from the beginning of any record before it."""
    if format.startswith("lines:"):
        return number % int(format[6:]) == 0
    if format == "text":
        return not line.strip()
    return format == "jsonl" or (format == "wikiextractor" and line.startswith(DOC_END))


def _unfinished(format: str, buffer: bytearray) -> int:
    """Return the start of the unfinished record at the end of the buffer; the buffer's length if there is none."""
    end, number = buffer.rfind(b"\n") + 1, buffer.count(b"\n")
    while end > 0 and format != "jsonl":
        if format == "wikiextractor":
            begin = buffer.rfind(b"\n" + DOC_END, 0, end) + 1
            end = buffer.find(b"\n", begin, end) + 1
        else:
            begin = buffer.rfind(b"\n", 0, end - 1) + 1
        if _ends_record(format, buffer[begin:end], number):
            break
        end, number = begin, number - 1
    return end


class _Cutter:
    """A stream that is cut into chunks of complete records."""

    def __init__(
        self, source: Source, stream: IO[bytes], after: Position, decompressor: Decompressor | None = None
    ) -> None:
        self.offset = after.offset
        self._source = source
        self._stream = stream
        self._lines = after.record
        self._decompressor = decompressor
        self._ended = False

    def next(self, num_bytes: int) -> Chunk | None:
        """Return `num_bytes` and the rest of the last record; None at the end of the file."""
        if self._ended:
            return None
        buffer = bytearray(self._stream.read(num_bytes))
        self._ended = len(buffer) < num_bytes
        begin = self._finish(buffer)
        num_bytes, num_lines = len(buffer), buffer.count(b"\n")
        bad_records: tuple[BadRecord, ...] = ()
        if num_bytes - begin > MAX_RECORD_BYTES:
            in_line, record_lines = not buffer.endswith(b"\n"), buffer.count(b"\n", begin)
            bad_records = (self._cut_off(buffer, begin, f"longer than {MAX_RECORD_BYTES:,} bytes"),)
            skipped_bytes, skipped_lines = self._skip_record(in_line, record_lines)
            num_bytes, num_lines = num_bytes + skipped_bytes, num_lines + skipped_lines
        elif self._ended and self._decompressor is not None and self._decompressor.damage:
            reason = f"damaged or not {self._source.compression} data; the rest of the file is lost"
            bad_records = (self._cut_off(buffer, begin, reason, self._decompressor.damage),)
        if not num_bytes and not bad_records:
            return None
        first, offset = self._lines + 1, self.offset
        self.offset += num_bytes
        if self._lines >= 0:
            self._lines += num_lines
        bytes_read = self.offset if self._decompressor is None else self._decompressor.disk_offset(offset)
        position = Position(0, self.offset, self._lines)
        path, format = self._source.path, self._source.format
        return Chunk(path, format, bytes(buffer), first, offset, bytes_read, position, bad_records)

    def _finish(self, buffer: bytearray) -> int:
        """Read to the end of the unfinished record. Returns its start if it is too long or the file's last record."""
        format = self._source.format
        begin = _unfinished(format, buffer)
        number = buffer.count(b"\n", begin)
        while begin < len(buffer) <= begin + MAX_RECORD_BYTES:
            part = self._stream.readline(min(_PART_BYTES, begin + MAX_RECORD_BYTES + 1 - len(buffer)))
            if not part:
                self._ended = True
                break
            buffer += part
            if part.endswith(b"\n"):
                line = buffer.rfind(b"\n", begin, -1) + 1 or begin
                is_full = format in ("text", "file") and len(buffer) - begin >= MAX_TEXT_DOCUMENT_BYTES
                number += 1
                if is_full or _ends_record(format, buffer[line:], number):
                    return len(buffer)
        return begin

    def _cut_off(self, buffer: bytearray, begin: int, reason: str, detail: str = "") -> BadRecord:
        """Remove the record at `begin` from the buffer and return it as a bad record."""
        place, unit = self.offset + begin, "byte"
        if self._lines >= 0:
            place, unit = self._lines + buffer.count(b"\n", 0, begin) + 1, "line"
        excerpt = bytes(buffer[begin : begin + EXCERPT_BYTES])
        del buffer[begin:]
        return BadRecord(self._source.path, place, unit, reason, excerpt, detail)

    def _skip_record(self, in_line: bool, lines: int) -> tuple[int, int]:
        """Skip the rest of a record, of which `lines` are complete. Returns its bytes and lines."""
        sizes = [_skip_line(self._stream)[1]] if in_line else []
        number = int(self._source.format.partition(":")[2] or 0)
        while lines + len(sizes) < number and (num_bytes := _skip_line(self._stream)[1]):
            sizes.append(num_bytes)
        while self._source.format == "wikiextractor":
            head, num_bytes = _skip_line(self._stream)
            sizes.append(num_bytes)
            if not head or head.startswith(DOC_END):
                break
        return sum(sizes), len(sizes)


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
