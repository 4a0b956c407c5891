"""Read files of lines (text, jsonl, WikiExtractor output) as pieces of complete records, without parsing the lines.

A piece has about a chunk's size, and begins and ends between records. The end of a piece depends on its bytes only, so
a resumed run cuts in the same positions. parsing.py splits the lines, in worker processes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import IO

from ctxlm_ds.data.sources.compression import Decompressor
from ctxlm_ds.data.sources.types import EXCERPT_BYTES, BadRecord, Piece, Position, ReadLimits, Source, Span

_PART_BYTES = 1 << 20
"""Most bytes of a line read at a time."""
DOC_END = b"</doc>"


def read_lines(source: Source, span: Span, limits: ReadLimits, after: Position | None) -> Iterator[Piece]:
    """Yield the pieces of `source` that belong to `span`.

    Of an uncompressed file these are the records between the record ends that follow span.start and span.end, of a
    compressed one the pieces that begin in blocks of the span. Raises DataError (zstandard is not installed) and the
    disk's OSError.
    """
    with open(source.path, "rb") as raw:
        if source.compression:
            yield from _read_compressed(source, raw, span, limits, after)
        else:
            yield from _read_seekable(source, raw, span, limits, after)


def _read_seekable(
    source: Source, raw: IO[bytes], span: Span, limits: ReadLimits, after: Position | None
) -> Iterator[Piece]:
    size = os.fstat(raw.fileno()).st_size
    end = _record_end(raw, source.format, span.end, size)
    if after is None:
        start = _record_end(raw, source.format, span.start, size)
        after = Position(0, start, 0 if start == 0 else -1)
    raw.seek(after.offset)
    cutter = _Cutter(source, raw, limits, after)
    while cutter.offset < end and (piece := cutter.next(end - cutter.offset)) is not None:
        yield piece


def _read_compressed(
    source: Source, raw: IO[bytes], span: Span, limits: ReadLimits, after: Position | None
) -> Iterator[Piece]:
    decompressor = Decompressor(raw, source.compression, source.path)
    stream = io.BufferedReader(decompressor, 1 << 18)
    after = after or Position(0)
    left = after.offset
    while left and (skipped := stream.read(min(left, _PART_BYTES))):
        left -= len(skipped)
    cutter = _Cutter(source, stream, limits, after, decompressor)
    while True:
        start = cutter.offset
        piece = cutter.next(limits.chunk_bytes)
        begins_at = decompressor.disk_offset(start)
        if piece is None or begins_at >= span.end:
            return
        if begins_at >= span.start:
            yield piece


def _record_end(stream: IO[bytes], format: str, offset: int, size: int) -> int:
    """Return the first offset, at or behind `offset`, at which a record surely ends."""
    if offset <= 0 or offset >= size:
        return max(0, min(offset, size))
    stream.seek(offset - 1)
    _, num_bytes, _ = _skip_line(stream)
    place = offset - 1 + num_bytes
    line_ends_record = format == "jsonl"
    while not line_ends_record and place < size:
        head, num_bytes, _ = _skip_line(stream)
        place += num_bytes
        line_ends_record = len(head) == num_bytes and _ends_record(format, head)
    return min(place, size)


def _skip_line(stream: IO[bytes]) -> tuple[bytes, int, int]:
    """Skip the rest of a line in bounded memory. Returns its beginning, its bytes and its line ends (1 or 0)."""
    head = part = stream.readline(_PART_BYTES)
    size = len(part)
    while part and not part.endswith(b"\n"):
        part = stream.readline(_PART_BYTES)
        size += len(part)
    return head, size, int(part.endswith(b"\n"))


def _ends_record(format: str, line: bytes | bytearray) -> bool:
    """Return whether a complete line ends a record."""
    if format == "text":
        return not line.strip()
    return format == "jsonl" or line.startswith(DOC_END)


def _unfinished(format: str, buffer: bytearray) -> int:
    """Return the start of the unfinished record at the end of the buffer; the buffer's length if there is none."""
    end = buffer.rfind(b"\n") + 1
    while end > 0 and format != "jsonl":
        if format == "wikiextractor":
            begin = buffer.rfind(b"\n" + DOC_END, 0, end) + 1
            end = buffer.find(b"\n", begin, end) + 1
        else:
            begin = buffer.rfind(b"\n", 0, end - 1) + 1
        if _ends_record(format, buffer[begin:end]):
            break
        end = begin
    return end


class _Cutter:
    """Cuts a stream into pieces of complete records."""

    def __init__(
        self,
        source: Source,
        stream: IO[bytes],
        limits: ReadLimits,
        after: Position,
        decompressor: Decompressor | None = None,
    ) -> None:
        self.offset = after.offset
        self._source = source
        self._stream = stream
        self._limits = limits
        self._lines = after.record
        self._decompressor = decompressor
        self._ended = False

    def next(self, room: int) -> Piece | None:
        """Return about a chunk: at most `room` bytes, and the end of its last record. None at the end of the file."""
        if self._ended:
            return None
        wanted = min(self._limits.chunk_bytes, room)
        buffer = bytearray(self._stream.read(wanted))
        self._ended = len(buffer) < wanted
        begin = self._finish(buffer)
        num_bytes, num_lines = len(buffer), buffer.count(b"\n")
        bad = None
        if num_bytes - begin > self._limits.record_bytes:
            in_line = not buffer.endswith(b"\n")
            bad = self._cut_off(buffer, begin, f"longer than {self._limits.record_bytes:,} bytes")
            skipped_bytes, skipped_lines = self._skip_record(in_line)
            num_bytes, num_lines = num_bytes + skipped_bytes, num_lines + skipped_lines
        elif self._ended and self._decompressor is not None and self._decompressor.damage:
            reason = f"damaged or not {self._source.compression} data; the rest of the file is lost"
            bad = self._cut_off(buffer, begin, reason, self._decompressor.damage)
        if not num_bytes and bad is None:
            return None
        return self._advance(bytes(buffer), num_bytes, num_lines, bad)

    def _finish(self, buffer: bytearray) -> int:
        """Read to the end of the unfinished record. Returns its start if it is too long or the file's last record."""
        format = self._source.format
        begin = _unfinished(format, buffer)
        while begin < len(buffer) <= begin + self._limits.record_bytes:
            room = begin + self._limits.record_bytes + 1 - len(buffer)
            part = self._stream.readline(min(_PART_BYTES, room))
            if not part:
                self._ended = True
                break
            buffer += part
            if part.endswith(b"\n"):
                line = buffer.rfind(b"\n", begin, -1) + 1 or begin
                full = format == "text" and len(buffer) - begin >= self._limits.text_document_bytes
                if full or _ends_record(format, buffer[line:]):
                    return len(buffer)
        return begin

    def _cut_off(self, buffer: bytearray, begin: int, reason: str, detail: str = "") -> BadRecord:
        """Remove the record at `begin` from the buffer and return it as a bad record."""
        counted = self._lines >= 0
        place = self._lines + buffer.count(b"\n", 0, begin) + 1 if counted else self.offset + begin
        excerpt = bytes(buffer[begin : begin + EXCERPT_BYTES])
        del buffer[begin:]
        return BadRecord(self._source.path, place, "line" if counted else "byte", reason, excerpt, detail)

    def _skip_record(self, in_line: bool) -> tuple[int, int]:
        """Skip the rest of a record. Returns its bytes and lines."""
        num_bytes = num_lines = 0
        if in_line:
            _, num_bytes, num_lines = _skip_line(self._stream)
        while self._source.format == "wikiextractor":
            head, line_bytes, line_ends = _skip_line(self._stream)
            num_bytes, num_lines = num_bytes + line_bytes, num_lines + line_ends
            if not head or head.startswith(DOC_END):
                break
        return num_bytes, num_lines

    def _advance(self, records: bytes, num_bytes: int, num_lines: int, bad: BadRecord | None) -> Piece:
        first, offset = self._lines + 1, self.offset
        self.offset += num_bytes
        if self._lines >= 0:
            self._lines += num_lines
        disk_bytes = self.offset if self._decompressor is None else self._decompressor.disk_offset(offset)
        return Piece(records, first, offset, self.offset, self._lines, disk_bytes, () if bad is None else (bad,))
