"""Values of reading a corpus: sources, shards, positions, chunks, bad records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctxlm_ds.errors import DataError

INPUT_FORMATS = ("auto", "text", "jsonl", "wikiextractor", "parquet", "arrow")
LINE_FORMATS = ("text", "jsonl", "wikiextractor")
EXCERPT_BYTES = 200
MAX_RECORD_BYTES = 256_000_000
"""A longer record is a bad record, and is never held in memory completely."""

KEY_HINT = "; see --json-keys"
"""Suffix of the error of a missing key or column; tools with another flag replace it."""

Document = dict[str, str]
"""Text by key."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file, or one Hugging Face data set."""

    path: str
    format: str
    """`text`, `jsonl`, `wikiextractor`, `parquet`, `arrow` or `hf`."""
    compression: str
    """`gz`, `xz`, `bz2`, `zst` or empty."""
    num_bytes: int
    """Size on disk; 0 if unknown (hf://)."""


@dataclass(frozen=True, slots=True)
class InputShard:
    """Part `index` (from 0) of `count` parts of the input. Raises DataError if there is no such part."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise DataError(f"shard {self.index}/{self.count}: the parts of {self.count} are 0 to {self.count - 1}")

    @classmethod
    def parse(cls, text: str) -> InputShard:
        """Convert `3/16` to InputShard(3, 16). Raises DataError for anything else."""
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
        if match is None:
            raise DataError(f"shard {text!r}: write i/n, part i (from 0) of n, for example 0/16")
        return cls(int(match[1]), int(match[2]))


WHOLE = InputShard()
"""All of the input."""


@dataclass(frozen=True, slots=True)
class Position:
    """Position behind a chunk, from which reading resumes."""

    source: int
    """Index into the sources."""
    offset: int = 0
    """Bytes of the decompressed file already read; chunks already seen of a data set from the Hub."""
    record: int = 0
    """Lines or rows of the source already read; -1 if lines are not counted (a shard that begins inside a file)."""

    @classmethod
    def from_json(cls, value: Any) -> Position:
        """Return the position that `asdict` gave `value` for. Raises DataError if it is not such an object."""
        names = {"source", "offset", "record"}
        if not isinstance(value, dict) or set(value) != names or {type(number) for number in value.values()} != {int}:
            raise DataError(f"{value!r} is no position in a corpus; start from the beginning")
        return cls(**value)


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that is no document, or the unreadable rest of a file."""

    path: str
    position: int
    """First line or row (from 1), or first byte (from 0), of the record."""
    unit: str
    """`line`, `row` or `byte`."""
    reason: str
    """One of few, by which records are counted."""
    excerpt: bytes = b""
    """The first bytes of the record, at most EXCERPT_BYTES."""
    detail: str = ""
    """Details of this record."""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.path}, {self.unit} {self.position}: {self.reason}{detail}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive records of one source as its reader found them."""

    records: bytes | list[dict[str, Any]]
    """Complete lines, not yet split, or rows."""
    first: int
    """Number of the first line or row, from 1; 0 if lines are not counted."""
    offset: int
    """Bytes of the decompressed file before this piece; 0 for rows."""
    next_offset: int
    next_record: int
    """Fields of the Position behind it."""
    disk_bytes: int
    """Bytes of the file on disk read when this piece was complete."""
    bad_records: tuple[BadRecord, ...] = ()
    """Records that the reader could not read: too long, or the damaged rest of a file."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece, not yet parsed, with its position among all sources."""

    path: str
    format: str
    records: bytes | list[dict[str, Any]]
    first: int
    offset: int
    bad_records: tuple[BadRecord, ...]
    bytes_read: int
    """Bytes on disk of this shard of the input read when this chunk was complete."""
    position: Position
    """`read_chunks(..., after=position)` continues behind this chunk."""


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes [start, end) of a file on disk that belong to a shard."""

    start: int
    end: int

    def owns(self, offset: int) -> bool:
        return self.start <= offset < self.end


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits on the size of a piece."""

    chunk_bytes: int
    chunk_rows: int
    text_document_bytes: int
    record_bytes: int


def excerpt_of(record: Any, json_keys: Sequence[str]) -> bytes:
    """Return the beginning of a line, or of a row's first text."""
    if isinstance(record, dict):
        record = next((record[key] for key in json_keys if isinstance(record.get(key), str | bytes)), b"")
    if isinstance(record, str):
        record = record[:EXCERPT_BYTES].encode("utf-8", "replace")
    return bytes(record[:EXCERPT_BYTES])
