"""Read the rows of parquet and Arrow files, and of data sets from the Hugging Face Hub, as chunks.

A parquet row group or Arrow record batch belongs to the span (of a shard) that holds its middle. Strings of files stay
undecoded bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import pyarrow
from pyarrow import ipc, parquet

from ctxlm_ds.data.sources.types import KEY_HINT, BadRecord, Chunk, InputShard, Position, Source, Span
from ctxlm_ds.errors import DataError

CHUNK_ROWS = 4096
HF_SCHEME = "hf://"
_BATCH_ROWS = 256
_READ_BYTES = 1 << 20
_IPC_MAGIC = b"ARROW1"
_DAMAGE = (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError)
"""Raised by pyarrow for data that it cannot read."""
_BINARY = {
    pyarrow.string(): pyarrow.binary(),
    pyarrow.large_string(): pyarrow.large_binary(),
    pyarrow.string_view(): pyarrow.binary_view(),
}

Row = dict[str, Any]


class _Group(NamedTuple):
    """A parquet row group or an Arrow record batch."""

    middle: int
    """Its middle, in bytes of the file (parquet: in proportion to rows; IPC file: to batches)."""
    num_rows: int
    batches: Callable[[], Iterable[Any]]


def read_table(
    source: Source, json_keys: Sequence[str], span: Span, chunk_bytes: int, after: Position | None
) -> Iterator[Chunk]:
    """Yield the rows of one parquet or Arrow file that belong to `span`, with the columns `json_keys`.

    An unreadable row group of parquet, or the unreadable rest of an Arrow file, is a bad record. Raises DataError if a
    column is missing.
    """
    open_groups = _parquet_groups if source.format == "parquet" else _arrow_groups
    start_row = after.record if after else 0
    middle = row = 0
    with ExitStack() as stack:
        groups = open_groups(source.path, json_keys, stack)
        while True:
            try:
                group = next(groups, None)
            except _DAMAGE as error:
                if span.owns(middle) and row >= start_row:
                    yield _lost_rows(source, row, row, error, "file")
                return
            if group is None or group.middle >= span.end:
                return
            middle = group.middle
            if span.owns(middle):
                yield from _read_group(source, json_keys, chunk_bytes, group, row, max(start_row, row))
            row += group.num_rows


def _read_group(
    source: Source, json_keys: Sequence[str], chunk_bytes: int, group: _Group, group_start: int, row: int
) -> Iterator[Chunk]:
    """Yield a group that begins with row `group_start` (from 0) of the file, from row `row` on."""
    end = group_start + group.num_rows
    if row >= end:
        return
    try:
        for rows in _chunked(_rows(group, json_keys, row - group_start), chunk_bytes, bytes):
            position = Position(0, 0, row + len(rows))
            yield Chunk(source.path, source.format, rows, row + 1, 0, group.middle, position)
            row = position.record
    except _DAMAGE as error:
        yield _lost_rows(source, row, end, error, "row group")


def _lost_rows(source: Source, row: int, end: int, error: Exception, part: str) -> Chunk:
    """Return a chunk whose bad record covers rows `row` to `end`. Raises errors of the disk."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error
    reason = f"damaged or not {source.format} data; the rest of the {part} is lost"
    bad = BadRecord(source.path, row + 1, "row", reason, b"", " ".join(str(error).split())[:300])
    return Chunk(source.path, source.format, [], row + 1, 0, 0, Position(0, 0, end), (bad,))


def _rows(group: _Group, json_keys: Sequence[str], skip: int) -> Iterator[Row]:
    for batch in group.batches():
        for start in range(min(skip, batch.num_rows), batch.num_rows, _BATCH_ROWS):
            part = batch.slice(start, _BATCH_ROWS)
            columns = [_python_values(part.column(key)) for key in json_keys]
            for values in zip(*columns, strict=True):
                yield dict(zip(json_keys, values, strict=True))
        skip = max(0, skip - batch.num_rows)


def _python_values(column: Any) -> list[Any]:
    """Return strings as bytes, which parsing decodes. Offsets are checked first."""
    if isinstance(column.type, pyarrow.DictionaryType):
        column.validate(full=True)
        column = column.dictionary_decode()
    if column.type in _BINARY:
        column = column.view(_BINARY[column.type])
    column.validate(full=True)
    return column.to_pylist()


def _chunked(rows: Iterable[Row], chunk_bytes: int, text: type[str] | type[bytes]) -> Iterator[list[Row]]:
    """Cut rows into chunks of limited size, by their values of type `text`."""
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += sum(len(value) for value in row.values() if isinstance(value, text))
        if size >= chunk_bytes or len(chunk) >= CHUNK_ROWS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _check_columns(path: str, present: Sequence[str], json_keys: Sequence[str]) -> None:
    for key in json_keys:
        if key not in present:
            columns = ", ".join(sorted(present)) or "none"
            raise DataError(f"{path}: has no column {key!r}, only {columns}{KEY_HINT}")


def _parquet_groups(path: str, json_keys: Sequence[str], stack: ExitStack) -> Iterator[_Group]:
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


def read_hf(
    source: Source, json_keys: Sequence[str], shard: InputShard, chunk_bytes: int, after: Position | None
) -> Iterator[Chunk]:
    """Yield the rows of `hf://NAME[?config=C&split=S&revision=R]` (split `train`) that belong to `shard`.

    A shard has consecutive files if there are at least as many files as shards, else every count-th chunk. Raises
    DataError if the data set cannot be read or has no such column.
    """
    import datasets

    after = after or Position()
    row, number = after.record, after.offset
    try:
        data_set = _open_hf(source.path, json_keys)
        by_files = data_set.num_shards >= shard.count
        if by_files:
            data_set = data_set.shard(shard.count, shard.index, contiguous=True)
        for rows in _chunked(data_set.skip(row) if row else data_set, chunk_bytes, str):
            position = Position(0, number + 1, row + len(rows))
            if by_files or number % shard.count == shard.index:
                yield Chunk(source.path, source.format, rows, row + 1, 0, 0, position)
            row, number = position.record, position.offset
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{source.path}: cannot be read through the datasets library ({error}); check the name, config and split, "
            "and that this machine reaches the Hub (a cluster's compute nodes often do not: preprocess on a login node)"
        ) from error


def _open_hf(name: str, json_keys: Sequence[str]) -> Any:
    """Return a streaming data set with the columns `json_keys`."""
    import datasets

    path, _, query = name.removeprefix(HF_SCHEME).partition("?")
    options = dict(parse_qsl(query))
    if set(options) - {"config", "split", "revision"} or not path:
        raise DataError(f"{name}: write hf://NAME, optionally ?config=C&split=S&revision=R")
    split, revision = options.get("split", "train"), options.get("revision")
    data_set = datasets.load_dataset(path, options.get("config"), split=split, revision=revision, streaming=True)
    if data_set.column_names is not None:
        _check_columns(name, data_set.column_names, json_keys)
        data_set = data_set.select_columns(list(json_keys))
    return data_set
