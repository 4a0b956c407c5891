"""Read the rows of parquet files and of data sets from the Hugging Face Hub as chunks.

A row group belongs to the span (of a shard) that holds its middle, in proportion to rows. Strings of files stay
undecoded bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl

import pyarrow
from pyarrow import parquet

from ctxlm_ds.data.sources.types import KEY_HINT, BadRecord, Chunk, InputShard, Position, Source
from ctxlm_ds.errors import DataError

CHUNK_ROWS = 4096
HF_SCHEME = "hf://"
_BATCH_ROWS = 256
_READ_BYTES = 1 << 20
_DAMAGE = (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError)
"""Raised by pyarrow for data that it cannot read."""
_BINARY = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}

Row = dict[str, Any]


def read_table(
    source: Source, json_keys: Sequence[str], span: range, chunk_bytes: int, after: Position | None
) -> Iterator[Chunk]:
    """Yield the rows of one parquet file that belong to `span`, with the columns `json_keys`.

    The unreadable rest of a row group is a bad record. Raises DataError if a column is missing.
    """
    start_row = after.record if after else 0
    try:
        # Read a page at a time (pre_buffer would load a complete column of a row group).
        options = {"buffer_size": _READ_BYTES, "pre_buffer": False, "page_checksum_verification": True}
        file = parquet.ParquetFile(source.path, **options)
        _check_columns(source.path, file.schema_arrow.names, json_keys)
        num_rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        if min(num_rows, default=0) < 0 or sum(num_rows) != file.metadata.num_rows:
            raise ValueError("its row groups contradict its number of rows")
    except _DAMAGE as error:
        if 0 in span and not start_row:
            yield _lost_rows(source, 0, 0, error, "file")
        return
    size, end = os.path.getsize(source.path), 0
    with file:
        for group, rows_of_group in enumerate(num_rows):
            begin, end = end, end + rows_of_group
            middle = min(size * (begin + end) // max(1, 2 * sum(num_rows)), size - 1)
            row = max(begin, start_row)
            if middle not in span or row >= end:
                continue
            try:
                batches = file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=list(json_keys))
                for rows in _chunked(_rows(batches, json_keys, row - begin), chunk_bytes, bytes):
                    position = Position(0, 0, row + len(rows))
                    yield Chunk(source.path, source.format, rows, row + 1, 0, middle, position)
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


def _rows(batches: Iterable[Any], json_keys: Sequence[str], skip: int) -> Iterator[Row]:
    for batch in batches:
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


def read_hf(
    source: Source, json_keys: Sequence[str], shard: InputShard, chunk_bytes: int, after: Position | None
) -> Iterator[Chunk]:
    """Yield the rows of `hf://NAME[?config=C&split=S&revision=R]` (split `train`) in the files that belong to `shard`.

    Raises DataError if the data set cannot be read, has no such column, or has fewer files than there are shards.
    """
    import datasets

    row = after.record if after else 0
    try:
        data_set = _open_hf(source.path, json_keys)
        if data_set.num_shards < shard.count:
            raise DataError(
                f"{source.path}: has {data_set.num_shards} file(s), too few for {shard.count} shards; use fewer shards "
                "or download it and name the files"
            )
        data_set = data_set.shard(shard.count, shard.index, contiguous=True)
        for rows in _chunked(data_set.skip(row) if row else data_set, chunk_bytes, str):
            position = Position(0, 0, row + len(rows))
            yield Chunk(source.path, source.format, rows, row + 1, 0, 0, position)
            row = position.record
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{source.path}: cannot be read through the datasets library ({error}); check the name, config and split, "
            "and that this machine reaches the Hub (a cluster's compute nodes often do not: preprocess on a login node)"
        ) from error


def _open_hf(name: str, json_keys: Sequence[str]) -> Any:
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
