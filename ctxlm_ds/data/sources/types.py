"""Values of reading a corpus: sources, shards, positions, chunks, bad records."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from ctxlm_ds.errors import DataError

INPUT_FORMATS = ("auto", "text", "jsonl", "wikiextractor", "parquet")
DOCUMENT_HELP = "document of plain text: line, lines:N (N lines), file, or blank (default): between blank lines"
NOT_UTF8 = "not valid UTF-8"
"""Reason against a record of another encoding."""
EXCERPT_BYTES = 200
MAX_RECORD_BYTES = 256_000_000
"""A longer record is a bad record, and is never held in memory completely."""
KEY_HINT = "; see --json-keys"
"""Suffix of the error of a missing key or column; tools with another flag replace it."""

Document = dict[str, str]
"""Text by key."""

Spans = list[tuple[int, int]]
"""First character of each span and the one after its last, in their order and without overlap."""


class SpannedDocument(Document):
    """A document and the spans that its record gives."""

    def __init__(self, texts: Document, spans: Spans) -> None:
        super().__init__(texts)
        self.spans = spans


@dataclass(frozen=True, slots=True)
class Source:
    """One file, or one Hugging Face data set."""

    path: str
    format: str
    """One of INPUT_FORMATS except `auto`, or `hf`; of plain text also `lines:N` or `file` (text_format)."""
    compression: str
    """`gz`, `xz`, `bz2`, `zst` or empty."""
    num_bytes: int
    """Size on disk; 0 if unknown (hf://)."""

    @property
    def name(self) -> str:
        """Name without the folder, on which no result depends; it may have any bytes."""
        return self.path if self.format == "hf" else os.path.basename(self.path)


def text_format(document: str) -> str:
    """Return the format of plain text by what a document is (PreprocessConfig). Raises DataError for another word."""
    if re.fullmatch(r"line|lines:[1-9]\d{0,8}|blank|file", document) is None:
        raise DataError(f"--document {document}: expected line, lines:N (N lines), blank (between blank lines) or file")
    return {"blank": "text", "line": "lines:1"}.get(document, document)


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


WHOLE_INPUT = InputShard()


@dataclass(frozen=True, slots=True)
class Position:
    """Position behind a chunk, from which reading resumes."""

    source: int = 0
    """Index into the sources."""
    offset: int = 0
    """Bytes of the decompressed file already read; 0 for rows."""
    record: int = 0
    """Lines or rows of the source already read; -1 if lines are not counted (a shard that begins inside a file)."""


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
    """The first EXCERPT_BYTES of the record."""
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.path}, {self.unit} {self.position}: {self.reason}{detail}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of one source, not yet parsed."""

    path: str
    format: str
    records: bytes | list[dict[str, Any]]
    """Complete lines, not yet split, or rows."""
    first: int
    """Number of the first line or row, from 1; 0 if lines are not counted."""
    offset: int
    """Bytes of the decompressed file before the chunk; 0 for rows."""
    bytes_read: int
    """Bytes on disk read when the chunk was complete: of the file in a reader, of the shard in `read_chunks`."""
    position: Position
    """Position behind the chunk, for `read_chunks(..., after=position)`; a reader leaves its `source` at 0."""
    bad_records: tuple[BadRecord, ...] = ()
    """Records that the reader could not read: too long, or the damaged rest of a file."""
