"""Read corpus files of any format as chunks of raw records: any shard of the input, from any position.

Inputs are files (text, jsonl, WikiExtractor output, parquet; lines also compressed), globs, and Hugging Face data sets
(`hf://NAME`, streamed; their code is never run). A chunk has about a megabyte, so memory does not grow with the corpus.
Shards: the files, one after another, have T bytes on disk; shard i of n has the bytes [T*i/n, T*(i+1)/n). A row group
of a parquet file belongs to the shard that holds its middle, in proportion to rows. Strings of files stay undecoded
bytes: parsing.py makes documents of chunks, in worker processes.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

import pyarrow
from pyarrow import parquet

from ctxlm_ds.atomic import PARTIAL_MARK
from ctxlm_ds.data.sources.lines import Decompressor, compression_of, read_lines
from ctxlm_ds.data.sources.types import (
    INPUT_FORMATS,
    KEY_HINT,
    WHOLE_INPUT,
    BadRecord,
    Chunk,
    InputShard,
    Position,
    Source,
    text_format,
)
from ctxlm_ds.errors import DataError

CHUNK_BYTES = 1 << 20
CHUNK_ROWS = 4096
HF_SCHEME = "hf://"
_BATCH_ROWS = 256
_READ_BYTES = 1 << 20
_DAMAGE = (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError)
"""Raised by pyarrow for data that it cannot read."""
_BINARY = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
_EXTENSIONS = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_NOT_READ = (".tar", ".tgz", ".zip", ".7z", ".rar", ".lz4", ".z", ".pdf", ".docx", ".arrow", ".feather")
_WIKIEXTRACTOR_NAME = re.compile(r"wiki_\d+")
_SIGNATURE_BYTES = 1 << 16

Row = dict[str, Any]


def find_sources(inputs: Sequence[str], input_format: str = "auto", document: str = "blank") -> list[Source]:
    """Return the sources that `inputs` name: paths, sorted globs and hf://NAME; `document` is one of plain text.

    A file named twice is taken once. Raises DataError for a missing file, a glob without a match, a folder, or
    an unknown format or document.
    """
    if input_format not in INPUT_FORMATS:
        raise DataError(f"input format {input_format!r} is not known; choose one of {', '.join(INPUT_FORMATS)}")
    sources: dict[str, Source] = {}
    plain = text_format(document)
    for name in inputs:
        if name.startswith(HF_SCHEME):
            sources.setdefault(name, Source(name, "hf", "", 0))
            continue
        for path in _expand(name):
            source = _file_source(path, input_format)
            source = replace(source, format=plain) if source.format == "text" else source
            sources.setdefault(os.path.realpath(path), source)
    if not sources:
        raise DataError("no input; name at least one file, glob or hf://NAME")
    if plain != "text" and all(source.format != plain for source in sources.values()):
        raise DataError(f"--document {document}: no input is plain text, so it has no effect; leave it out")
    return list(sources.values())


def _expand(name: str) -> list[str]:
    name = os.path.expanduser(name)
    if os.path.isdir(name):
        raise DataError(f"{name} is a folder; name its files, for example '{os.path.join(name, '*.jsonl')}'")
    if os.path.exists(name) or not glob.has_magic(name):
        return [name]
    found = sorted(path for path in glob.glob(name, recursive=True) if not os.path.isdir(path))
    paths = [path for path in found if not _is_unfinished(path)]
    if not paths:
        raise DataError(f"{name}: no file matches; check the pattern (quote it, so that the shell leaves it alone)")
    return paths


def _is_unfinished(path: str) -> bool:
    """Return whether a file is in a folder that a tool is writing, or that a killed one left."""
    return PARTIAL_MARK in os.path.basename(os.path.dirname(os.path.abspath(path)))


def _file_source(path: str, input_format: str) -> Source:
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise DataError(f"{path}: no such file; check its name") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file (reading cannot resume inside a pipe); write it to a file first")
    if _is_unfinished(path):
        raise DataError(f"{path}: in a folder that was never finished; make it again, or copy the file elsewhere")
    compression = compression_of(path)
    stem = path[: -len(compression) - 1] if compression else path
    if stem.lower().endswith(_NOT_READ):
        kinds = "archives, documents and Arrow files"
        raise DataError(f"{path}: {kinds} are not read; unpack it or convert it to text, jsonl or parquet first")
    chosen = _guess_format(path, stem, compression) if input_format == "auto" else input_format
    if chosen == "parquet" and compression:
        raise DataError(f"{path}: a {chosen} file cannot be read compressed; decompress it first")
    return Source(path, chosen, compression, status.st_size)


def _guess_format(path: str, stem: str, compression: str) -> str:
    name = os.path.basename(stem)
    if _WIKIEXTRACTOR_NAME.fullmatch(name):
        with open(path, "rb") as raw:  # WikiExtractor gives its JSON form the same name
            stream = Decompressor(raw, compression) if compression else raw
            return "jsonl" if (stream.read(1) or b"") == b"{" else "wikiextractor"
    return _EXTENSIONS.get(os.path.splitext(name)[1].lower(), "text")


def total_bytes(sources: Iterable[Source], shard: InputShard = WHOLE_INPUT) -> int:
    """Return the size on disk of all sources, or of a shard of them."""
    return len(_shard_span(sources, shard))


def _shard_span(sources: Iterable[Source], shard: InputShard) -> range:
    num_bytes = sum(source.num_bytes for source in sources)
    return range(num_bytes * shard.index // shard.count, num_bytes * (shard.index + 1) // shard.count)


def read_chunks(
    sources: Sequence[Source],
    json_keys: Sequence[str] = ("text",),
    shard: InputShard = WHOLE_INPUT,
    after: Position | None = None,
) -> Iterator[Chunk]:
    """Yield all records of a shard of the sources in chunks.

    All shards, one after another, give the complete input in order (of hf:// each shard has a share). Equal arguments
    give equal chunks. `after` is the position behind the last chunk that was read. Raises DataError if a file cannot be
    read.
    """
    after = after or Position()
    ours = _shard_span(sources, shard)
    end = 0
    for number, source in enumerate(sources):
        begin, end = end, end + source.num_bytes
        if number < after.source:
            continue
        inside = after if number == after.source and after != Position(number) else None
        span = _local(ours, begin, end, is_last_shard=shard.index + 1 == shard.count)
        if source.format == "hf":
            chunks = read_hf(source, json_keys, shard, inside)
        elif not span:
            continue
        elif source.format == "parquet":
            chunks = read_table(source, json_keys, span, inside)
        else:
            chunks = read_lines(source, span, CHUNK_BYTES, inside)
        # The chunk behind is read first, so that a finished file is not opened again to find its end.
        for chunk, following in itertools.pairwise(itertools.chain(chunks, (None,))):
            assert chunk is not None
            is_last = following is None
            bytes_read = end if is_last else min(begin + chunk.bytes_read, end)
            position = Position(number + 1) if is_last else replace(chunk.position, source=number)
            yield replace(chunk, bytes_read=min(max(bytes_read, ours.start), ours.stop) - ours.start, position=position)


def _local(ours: range, begin: int, end: int, is_last_shard: bool) -> range:
    """Return the part of the shard `ours` within the file at [begin, end), in the file's bytes.

    An empty file, which may be a damaged one, belongs to the shard that owns its position, at the end to the last.
    """
    if begin == end:
        return range(int(begin in ours or (is_last_shard and begin == ours.stop)))
    return range(max(0, min(ours.start, end) - begin), max(0, min(ours.stop, end) - begin))


def check_keys(sources: Iterable[Source], json_keys: Sequence[str], flags: str = "--json-keys") -> None:
    """Raise DataError if a key is named twice, or several for a format that has one text per document."""
    if not json_keys or len(set(json_keys)) != len(json_keys):
        raise DataError(f"{flags} {' '.join(json_keys)}: name each key once")
    for source in sources:
        if source.format.startswith(("text", "lines:", "file")) and len(json_keys) > 1:
            raise DataError(f"{source.path}: plain text has one text per document, {flags} name {len(json_keys)}")


def source_signature(sources: Iterable[Source]) -> str:
    """Return a sha256 (hex) over each source's name, format and size and its first and last 64 KiB.

    Of a data set from the Hub it covers the hf:// address only (name a revision to pin it). Raises the disk's OSError.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update(json.dumps([source.name, source.format, source.compression, source.num_bytes]).encode())
        if source.format != "hf":
            with open(source.path, "rb") as file:
                digest.update(file.read(_SIGNATURE_BYTES))
                file.seek(max(0, source.num_bytes - _SIGNATURE_BYTES))
                digest.update(file.read(_SIGNATURE_BYTES))
    return digest.hexdigest()


def read_table(source: Source, json_keys: Sequence[str], span: range, after: Position | None) -> Iterator[Chunk]:
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
                for rows in _chunked(_rows(batches, json_keys, row - begin), bytes):
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
            for values in zip(*[_python_values(part.column(key)) for key in json_keys], strict=True):
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


def _chunked(rows: Iterable[Row], text: type[str] | type[bytes]) -> Iterator[list[Row]]:
    """Cut rows into chunks of limited size, by their values of type `text`."""
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += sum(len(value) for value in row.values() if isinstance(value, text))
        if size >= CHUNK_BYTES or len(chunk) >= CHUNK_ROWS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _check_columns(path: str, present: Sequence[str], json_keys: Sequence[str]) -> None:
    for key in json_keys:
        if key not in present:
            columns = ", ".join(sorted(present)) or "none"
            raise DataError(f"{path}: has no column {key!r}, only {columns}{KEY_HINT}")


def read_hf(source: Source, json_keys: Sequence[str], shard: InputShard, after: Position | None) -> Iterator[Chunk]:
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
        for rows in _chunked(data_set.skip(row) if row else data_set, str):
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
