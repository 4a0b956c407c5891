"""Rows of parquet files and of Hugging Face data sets, streamed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl

from ctxlm_ds.errors import DataError

Rows = list[tuple[int, dict[str, Any]]]


def read_parquet(path: str, json_keys: Sequence[str], chunk_bytes: int, chunk_rows: int) -> Iterator[tuple[Rows, int]]:
    """Rows of one file, only the columns asked for, a batch at a time, each with the bytes of the file behind it."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            present = set(file.schema_arrow.names)
            columns = [key for key in json_keys if key in present]
            if len(columns) < len(json_keys):
                missing = next(key for key in json_keys if key not in present)
                raise DataError(
                    f"{path}: has no column {missing!r}, only {', '.join(sorted(present))}; name one with --json-keys"
                )
            position, size = 0, os.path.getsize(path)
            for group in range(file.num_row_groups):
                batches = file.iter_batches(batch_size=256, row_groups=[group], columns=columns)
                for rows in _chunked((row for batch in batches for row in batch.to_pylist()), chunk_bytes, chunk_rows):
                    numbered = list(enumerate(rows, start=position + 1))
                    position += len(rows)
                    yield numbered, size * (group + 1) // file.num_row_groups
    except (pyarrow.ArrowInvalid, pyarrow.ArrowIOError) as error:
        raise DataError(f"{path}: not a readable parquet file ({error}); download or write it again") from error


def read_hf(name: str, json_keys: Sequence[str], chunk_bytes: int, chunk_rows: int) -> Iterator[tuple[Rows, int]]:
    """Rows of `hf://NAME[?config=C&split=S&revision=R]` (split `train`), streamed; code of a data set is never run."""
    import datasets

    path, _, query = name.removeprefix("hf://").partition("?")
    options = dict(parse_qsl(query))
    unknown = set(options) - {"config", "split", "revision"}
    if unknown or not path:
        raise DataError(f"{name}: write hf://NAME, optionally ?config=C&split=S&revision=R")
    try:
        split, revision = options.get("split", "train"), options.get("revision")
        rows = datasets.load_dataset(path, options.get("config"), split=split, revision=revision, streaming=True)
        position = 0
        for chunk in _chunked(iter(rows), chunk_bytes, chunk_rows):
            yield list(enumerate(chunk, start=position + 1)), 0
            position += len(chunk)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{name}: cannot be read through the datasets library ({error}); check the name, config and split, and "
            "that this machine reaches the Hub (a cluster's compute nodes often do not: preprocess on a login node)"
        ) from error


def _chunked(rows: Iterable[dict[str, Any]], chunk_bytes: int, chunk_rows: int) -> Iterator[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += sum(len(value) for value in row.values() if isinstance(value, str))
        if size >= chunk_bytes or len(chunk) >= chunk_rows:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
