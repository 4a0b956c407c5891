"""Corpus files to chunks of raw records, and records to documents.

In: text (documents between blank lines), jsonl, parquet, each also compressed, globs, hf://NAME.
Out: chunks of about a megabyte, read one at a time (memory does not grow with the corpus); documents as texts by key.
Not here: sentences, tokens. Parsing is apart from reading, so that worker processes do it.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from ctxlm_ds.data.compression import DECOMPRESSION_ERRORS, compression_of, open_decompressed
from ctxlm_ds.errors import DataError

CHUNK_BYTES = 1 << 20
CHUNK_RECORDS = 4096
MAX_TEXT_DOCUMENT_BYTES = 64 << 20
"""A text document without any blank line is cut at the next line end beyond this."""
INPUT_FORMATS = ("auto", "text", "jsonl", "parquet")
HF_SCHEME = "hf://"

_EXTENSIONS = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_GLOB_CHARACTERS = ("*", "?", "[")


@dataclass(frozen=True, slots=True)
class Source:
    """One file, or one Hugging Face data set."""

    path: str
    format: str
    """`text`, `jsonl`, `parquet` or `hf`."""
    compression: str
    """`gz`, `xz`, `bz2`, `zst` or empty."""
    num_bytes: int
    """Size on disk; 0 where unknown (hf://)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of one source, not yet parsed."""

    path: str
    format: str
    records: list[tuple[int, Any]]
    """(position from 1, record): the line of a text or jsonl document as bytes, or the row of a table as a dict."""
    bytes_read: int
    """Bytes of all sources read when this chunk was complete (on disk, so compressed where the file is)."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that is no document."""

    path: str
    position: int
    unit: str
    """`line` or `row`."""
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.position}: {self.reason}"


Document = dict[str, str]
"""Text by key."""


def find_sources(inputs: Sequence[str], input_format: str = "auto") -> list[Source]:
    """The sources that `inputs` name: paths, globs (in sorted order) and hf://NAME; a file named twice is taken once.

    Raises DataError for a missing file, a glob without a match, a folder, or an unknown format.
    """
    if input_format not in INPUT_FORMATS:
        raise DataError(f"input format {input_format!r} is not known; choose one of {', '.join(INPUT_FORMATS)}")
    sources: dict[str, Source] = {}
    for name in inputs:
        if name.startswith(HF_SCHEME):
            sources.setdefault(name, Source(name, "hf", "", 0))
            continue
        for path in _expand(name):
            sources.setdefault(os.path.realpath(path), _file_source(path, input_format))
    if not sources:
        raise DataError("no input; name at least one file, glob or hf://NAME with --input")
    return list(sources.values())


def _expand(name: str) -> list[str]:
    name = os.path.expanduser(name)
    if os.path.exists(name) or not any(character in name for character in _GLOB_CHARACTERS):
        return [name]
    paths = sorted(path for path in glob.glob(name, recursive=True) if not os.path.isdir(path))
    if not paths:
        raise DataError(f"{name}: no file matches; check the pattern (quote it, so that the shell leaves it alone)")
    return paths


def _file_source(path: str, input_format: str) -> Source:
    if os.path.isdir(path):
        raise DataError(f"{path} is a folder; name its files, for example --input '{os.path.join(path, '*.jsonl')}'")
    try:
        num_bytes = os.stat(path).st_size
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check --input") from error
    compression = compression_of(path)
    stem = path[: -len(compression) - 1] if compression else path
    guessed = _EXTENSIONS.get(os.path.splitext(stem)[1].lower(), "text")
    chosen = guessed if input_format == "auto" else input_format
    if chosen == "parquet" and compression:
        raise DataError(f"{path}: a parquet file is read as it is; decompress it first")
    return Source(path, chosen, compression, num_bytes)


def total_bytes(sources: Iterable[Source]) -> int:
    """Size on disk of all sources."""
    return sum(source.num_bytes for source in sources)


def read_chunks(sources: Sequence[Source], json_keys: Sequence[str] = ("text",)) -> Iterator[Chunk]:
    """All records of all sources, in order. Raises DataError where a file cannot be read or decompressed."""
    done = 0
    for source in sources:
        for records, read in _read_source(source, json_keys):
            yield Chunk(source.path, source.format, records, done + read)
        done += source.num_bytes


def _read_source(source: Source, json_keys: Sequence[str]) -> Iterator[tuple[list[tuple[int, Any]], int]]:
    if source.format in ("parquet", "hf"):
        from ctxlm_ds.data.tables import read_hf, read_parquet

        reader = read_hf if source.format == "hf" else read_parquet
        yield from reader(source.path, json_keys, CHUNK_BYTES, CHUNK_RECORDS)
        return
    with open(source.path, "rb") as raw:
        try:
            with open_decompressed(raw, source.compression, source.path) as stream:
                records = _json_records(stream) if source.format == "jsonl" else _text_records(stream)
                for chunk in _batched(records):
                    yield chunk, raw.tell()
        except (*DECOMPRESSION_ERRORS, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's error, not the decoder's
            raise DataError(
                f"{source.path}: damaged or not {source.compression} data ({error or type(error).__name__}); "
                "download or compress it again"
            ) from error


def _batched(records: Iterable[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    chunk: list[tuple[int, bytes]] = []
    size = 0
    for record in records:
        chunk.append(record)
        size += len(record[1])
        if size >= CHUNK_BYTES or len(chunk) >= CHUNK_RECORDS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _json_records(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield number, line


def _text_records(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Documents are what blank lines separate."""
    lines: list[bytes] = []
    first, size = 1, 0
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            if not lines:
                first = number
            lines.append(line)
            size += len(line)
        if lines and (not line.strip() or size >= MAX_TEXT_DOCUMENT_BYTES):
            yield first, b"".join(lines)
            lines, size = [], 0
    if lines:
        yield first, b"".join(lines)


def parse_chunk(chunk: Chunk, json_keys: Sequence[str]) -> Iterator[Document | BadRecord]:
    """The document of each record, or what is wrong with it; texts hold no lone surrogates."""
    unit = "row" if chunk.format in ("parquet", "hf") else "line"
    for position, record in chunk.records:
        try:
            if chunk.format == "text":
                yield {key: record.decode("utf-8").strip("\r\n") for key in json_keys}
            else:
                yield _fields(json.loads(record.decode("utf-8")) if chunk.format == "jsonl" else record, json_keys)
        except UnicodeDecodeError as error:
            reason = f"not valid UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start})"
            yield BadRecord(chunk.path, position, unit, reason)
        except json.JSONDecodeError as error:
            yield BadRecord(chunk.path, position, unit, f"not valid JSON ({error.msg} at column {error.colno})")
        except RecursionError:
            yield BadRecord(chunk.path, position, unit, "not valid JSON (nested too deeply)")
        except ValueError as error:
            yield BadRecord(chunk.path, position, unit, str(error))


def _fields(record: Any, json_keys: Sequence[str]) -> Document:
    if not isinstance(record, dict):
        raise ValueError(f"holds a {type(record).__name__} where an object with the key {json_keys[0]!r} is expected")
    document = {}
    for key in json_keys:
        if key not in record:
            present = ", ".join(sorted(map(str, record))) or "none"
            raise ValueError(f"has no key {key!r} (its keys: {present}); see --json-keys")
        text = record[key]
        if text is None:
            text = ""
        if not isinstance(text, str):
            raise ValueError(f"the value of {key!r} is a {type(text).__name__}, not text")
        document[key] = text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
    return document


def check_keys(sources: Iterable[Source], json_keys: Sequence[str]) -> None:
    """Raises DataError where several keys are asked of a format that has one text a document, or a key twice."""
    if not json_keys or len(set(json_keys)) != len(json_keys):
        raise DataError(f"--json-keys {' '.join(json_keys)}: name each key once")
    for source in sources:
        if source.format == "text" and len(json_keys) > 1:
            raise DataError(f"{source.path}: plain text has one text a document, --json-keys names {len(json_keys)}")
