"""Stream the rows of parquet and Arrow files; strings stay undecoded bytes.

A parquet row group or Arrow record batch belongs to the span (of a shard) that holds its middle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from ctxlm_ds.data.sources.types import KEY_HINT, BadRecord, Piece, Position, ReadLimits, Source, Span
from ctxlm_ds.errors import DataError

_BATCH_ROWS = 256
_READ_BYTES = 1 << 20
_IPC_MAGIC = b"ARROW1"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Group:
    """A parquet row group or an Arrow record batch."""

    middle: int
    """Its middle, in bytes of the file (parquet: in proportion to rows; IPC file: to batches)."""
    num_rows: int
    batches: Callable[[], Iterable[Any]]


def read_table(
    source: Source, json_keys: Sequence[str], span: Span, limits: ReadLimits, after: Position | None
) -> Iterator[Piece]:
    """Yield the rows of one parquet or Arrow file that belong to `span`, with the columns `json_keys`.

    An unreadable row group of parquet, or the unreadable rest of an Arrow file, is a bad record. Raises DataError if a
    column is missing.
    """
    reader = _TableReader(source, json_keys, limits, after.record if after else 0)
    with ExitStack() as stack:
        open_groups = _parquet_groups if source.format == "parquet" else _arrow_groups
        groups = open_groups(source.path, json_keys, stack)
        rows_before = 0
        place = 0
        while True:
            try:
                group = next(groups, None)
            except _damage() as error:
                if span.owns(place) and rows_before >= reader.row:
                    yield reader.lost(rows_before, rows_before, error, "file")
                return
            if group is None or group.middle >= span.end:
                return
            place = group.middle
            if span.owns(place):
                yield from reader.read(group, rows_before)
            rows_before += group.num_rows


def _damage() -> tuple[type[Exception], ...]:
    """Return the exceptions that pyarrow raises for data that it cannot read."""
    import pyarrow

    return (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError)


class _TableReader:
    """Cuts the rows of groups into pieces, from row `row` (from 0) of the file on."""

    def __init__(self, source: Source, json_keys: Sequence[str], limits: ReadLimits, row: int) -> None:
        self.row = row
        self._source = source
        self._keys = json_keys
        self._limits = limits

    def read(self, group: _Group, rows_before: int) -> Iterator[Piece]:
        end = rows_before + group.num_rows
        row = max(self.row, rows_before)
        try:
            for rows in chunked(self._rows(group, row - rows_before), self._limits, bytes) if row < end else ():
                yield Piece(rows, row + 1, 0, 0, row + len(rows), group.middle)
                row += len(rows)
        except _damage() as error:
            yield self.lost(row, end, error, "row group")

    def lost(self, row: int, end: int, error: Exception, part: str) -> Piece:
        """Return a piece whose bad record covers rows `row` to `end`. Raises errors of the disk."""
        if isinstance(error, OSError) and error.errno is not None:
            raise error
        reason = f"damaged or not {self._source.format} data; the rest of the {part} is lost"
        detail = " ".join(str(error).split())[:300]
        return Piece([], row + 1, 0, 0, end, 0, (BadRecord(self._source.path, row + 1, "row", reason, b"", detail),))

    def _rows(self, group: _Group, skip: int) -> Iterator[Row]:
        for batch in group.batches():
            yield from _python_rows(batch.slice(min(skip, batch.num_rows)), self._keys)
            skip = max(0, skip - batch.num_rows)


def chunked(rows: Iterable[Row], limits: ReadLimits, text: type[str] | type[bytes]) -> Iterator[list[Row]]:
    """Cut rows into pieces of limited size, by their values of type `text`."""
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += sum(len(value) for value in row.values() if isinstance(value, text))
        if size >= limits.chunk_bytes or len(chunk) >= limits.chunk_rows:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _python_rows(batch: Any, json_keys: Sequence[str]) -> Iterator[Row]:
    for start in range(0, batch.num_rows, _BATCH_ROWS):
        part = batch.slice(start, _BATCH_ROWS)
        columns = [_python_values(part.column(key)) for key in json_keys]
        for values in zip(*columns, strict=True):
            yield dict(zip(json_keys, values, strict=True))


def _python_values(column: Any) -> list[Any]:
    """Return strings as bytes, which parsing decodes. Offsets are checked first."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(column.type):
        column.validate(full=True)
        column = column.dictionary_decode()
    for is_string, binary in (
        (types.is_string, pyarrow.binary()),
        (types.is_large_string, pyarrow.large_binary()),
        (types.is_string_view, pyarrow.binary_view()),
    ):
        if is_string(column.type):
            column = column.view(binary)
    column.validate(full=True)
    return column.to_pylist()


def _check_columns(path: str, present: Sequence[str], json_keys: Sequence[str]) -> None:
    for key in json_keys:
        if key not in present:
            columns = ", ".join(sorted(present)) or "none"
            raise DataError(f"{path}: has no column {key!r}, only {columns}{KEY_HINT}")


def _parquet_groups(path: str, json_keys: Sequence[str], stack: ExitStack) -> Iterator[_Group]:
    from pyarrow import parquet

    # Read a page at a time (pre_buffer would load a complete column of a row group).
    options = {"buffer_size": _READ_BYTES, "pre_buffer": False, "page_checksum_verification": True}
    file = stack.enter_context(parquet.ParquetFile(path, **options))
    _check_columns(path, file.schema_arrow.names, json_keys)
    num_rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    if min(num_rows, default=0) < 0 or sum(num_rows) != file.metadata.num_rows:
        raise ValueError("its row groups contradict its number of rows")
    size = os.path.getsize(path)
    before = 0
    for group, rows in enumerate(num_rows):
        middle = size * (2 * before + rows) // max(1, 2 * sum(num_rows))
        before += rows
        batches = partial(file.iter_batches, batch_size=_BATCH_ROWS, row_groups=[group], columns=list(json_keys))
        yield _Group(min(middle, size - 1), rows, batches)


def _arrow_groups(path: str, json_keys: Sequence[str], stack: ExitStack) -> Iterator[_Group]:
    """Yield the batches of an IPC file or an IPC stream; the magic number distinguishes them."""
    import pyarrow
    from pyarrow import ipc

    with open(path, "rb") as head:
        is_file = head.read(len(_IPC_MAGIC)) == _IPC_MAGIC
    mapped = stack.enter_context(pyarrow.memory_map(path, "r"))
    reader = stack.enter_context(ipc.open_file(mapped) if is_file else ipc.open_stream(mapped))
    _check_columns(path, reader.schema.names, json_keys)
    if is_file:
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            middle = mapped.size() * (2 * number + 1) // (2 * reader.num_record_batches)
            yield _Group(middle, batch.num_rows, partial(list, [batch]))
        return
    while True:
        begin = mapped.tell()
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return
        yield _Group((begin + mapped.tell()) // 2, batch.num_rows, partial(list, [batch]))
