"""Rows of Hugging Face data sets (`hf://NAME`), streamed through the datasets library; their code is never run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl

from ctxlm_ds.data.sources.types import KEY_HINT, Piece, Position, ReadLimits, Shard, Source
from ctxlm_ds.errors import DataError

HF_SCHEME = "hf://"
Row = dict[str, Any]


def read_hf(
    source: Source, json_keys: Sequence[str], shard: Shard, limits: ReadLimits, after: Position | None
) -> Iterator[Piece]:
    """The rows of `hf://NAME[?config=C&split=S&revision=R]` (split `train`) that belong to `shard`: some of its files
    where it has as many as there are shards, else every count-th chunk.

    Raises DataError where the data set cannot be read or has no such column.
    """
    import datasets

    start = after or Position(0)
    try:
        rows, by_files = _open(source.path, json_keys, shard)
        if start.record:
            rows = rows.skip(start.record)
        row, number = start.record, start.offset
        for chunk in _chunked(rows, limits):
            if by_files or number % shard.count == shard.index:
                yield Piece(chunk, row + 1, 0, number + 1, row + len(chunk), 0)
            row, number = row + len(chunk), number + 1
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{source.path}: cannot be read through the datasets library ({error}); check the name, config and split, "
            "and that this machine reaches the Hub (a cluster's compute nodes often do not: preprocess on a login node)"
        ) from error


def _open(name: str, json_keys: Sequence[str], shard: Shard) -> tuple[Any, bool]:
    """The rows, and whether they are this shard's files alone."""
    import datasets

    path, _, query = name.removeprefix(HF_SCHEME).partition("?")
    options = dict(parse_qsl(query))
    unknown = set(options) - {"config", "split", "revision"}
    if unknown or not path:
        raise DataError(f"{name}: write hf://NAME, optionally ?config=C&split=S&revision=R")
    split, revision = options.get("split", "train"), options.get("revision")
    rows = datasets.load_dataset(path, options.get("config"), split=split, revision=revision, streaming=True)
    if rows.column_names is not None:
        missing = next((key for key in json_keys if key not in rows.column_names), None)
        if missing is not None:
            columns = ", ".join(sorted(rows.column_names))
            raise DataError(f"{name}: has no column {missing!r}, only {columns}{KEY_HINT}")
        rows = rows.select_columns(list(json_keys))
    by_files = rows.num_shards >= shard.count
    return (rows.shard(shard.count, shard.index, contiguous=True) if by_files else rows), by_files


def _chunked(rows: Iterable[Row], limits: ReadLimits) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += sum(len(value) for value in row.values() if isinstance(value, str))
        if size >= limits.chunk_bytes or len(chunk) >= limits.chunk_rows:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
