"""The files of a prepared corpus: JSON lines in zstd, cut into parts of a bounded size.

In: lines of a source, in order. Out: SOURCE-00000.jsonl.zst, SOURCE-00001.jsonl.zst, ... with size, count and sha256.
Not here: which lines (prepare.py). The caller's folder is one that appears only when it is complete.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.errors import DataError

COMPRESSION_LEVEL = 3
UNFINISHED = ".unfinished"
"""Behind the names of all parts until everything else is written: no glob for corpora takes what a killed run left."""


@dataclass(frozen=True, slots=True)
class Part:
    """One finished file."""

    name: str
    documents: int
    num_bytes: int
    """On disk."""
    sha256: str


class PartWriter:
    """Writes the documents of one source; `close` finishes the last part (a source without documents has none)."""

    def __init__(self, directory: Path, source: str, part_bytes: int) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DataError("writing .zst needs the zstandard package; pip install zstandard") from error
        self._new_compressor = lambda: zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_checksum=True)
        self._directory = directory
        self._source = source
        self._part_bytes = part_bytes
        self._file: Any = None
        self._frame: Any = None
        self._digest = hashlib.sha256()
        self._documents, self._text_bytes, self._disk_bytes = 0, 0, 0
        self.parts: list[Part] = []

    def write(self, line: bytes) -> None:
        """One document; a part ends with the document that fills it."""
        if self._file is None:
            self._file = open(self._directory / f"{self._name()}{UNFINISHED}", "wb")  # noqa: SIM115 - closed by close()
            self._frame = self._new_compressor().compressobj()
            self._digest = hashlib.sha256()
            self._documents, self._text_bytes, self._disk_bytes = 0, 0, 0
        self._put(self._frame.compress(line))
        self._documents += 1
        self._text_bytes += len(line)
        if self._text_bytes >= self._part_bytes:
            self.close()

    def close(self) -> None:
        if self._file is None:
            return
        self._put(self._frame.flush())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self.parts.append(Part(self._name(), self._documents, self._disk_bytes, self._digest.hexdigest()))

    def publish(self) -> None:
        """Give the parts their names."""
        for part in self.parts:
            (self._directory / f"{part.name}{UNFINISHED}").rename(self._directory / part.name)

    def _name(self) -> str:
        return f"{self._source}-{len(self.parts):05d}.jsonl.zst"

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._disk_bytes += len(data)
