"""What the stages of a corpus are, and what a worker hands back of a chunk.

In: the filters of a data recipe. Out: plain values, small to pickle. Not here: the stages themselves (stages.py).
Imports no compiled code, so that reading a report costs nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.data.hygiene.corpora import FilterConfig
from ctxlm_ds.data.sources.types import BadRecord
from ctxlm_ds.errors import DataError

if TYPE_CHECKING:
    from ctxlm_ds.data.hygiene.duplicates import Signatures

EXCERPT_CHARACTERS = 200
STAGE_SETTINGS: dict[str, tuple[str, ...]] = {
    "length": ("min_words", "max_words", "min_characters", "max_characters"),
    "characters": ("min_letters", "scripts", "min_script_share"),
    "gopher_quality": ("gopher_quality",),
    "gopher_repetition": ("gopher_repetition",),
    "c4_quality": ("c4_quality",),
    "language": ("languages", "min_language_confidence"),
    "decontamination": ("decontaminate", "decontamination_ngram"),
    "exact_duplicates": ("exact_duplicates",),
    "near_duplicates": (
        "near_duplicates",
        "near_duplicate_threshold",
        "near_duplicate_shingle",
        "near_duplicate_permutations",
    ),
}
"""The stages in the order in which documents pass them, and the settings of each; the first ones turn it on."""
EMPTY_STAGE = "empty"
COMPRESSION_LEVEL = 3
UNFINISHED = ".unfinished"
"""Behind the names of all parts until everything else is written: no glob for corpora takes what a killed run left."""


def active_stages(filters: FilterConfig) -> dict[str, dict[str, object]]:
    """The stages that are on, in order, with their settings."""
    switches = {"characters": ("min_letters", "scripts"), "decontamination": ("decontaminate",)}
    off = FilterConfig()
    stages = {}
    for stage, names in STAGE_SETTINGS.items():
        switching = switches.get(stage, names[:1] if stage.endswith("duplicates") else names)
        if any(getattr(filters, name) != getattr(off, name) for name in switching):
            stages[stage] = {name: getattr(filters, name) for name in names}
    return stages


@dataclass(slots=True)
class Amount:
    """So much text."""

    documents: int = 0
    words: int = 0
    num_bytes: int = 0
    """UTF-8 bytes of the judged text."""

    def add(self, words: int, num_bytes: int, documents: int = 1) -> None:
        self.documents += documents
        self.words += words
        self.num_bytes += num_bytes


@dataclass(frozen=True, slots=True)
class Dropped:
    """A document that a stage did not let pass."""

    stage: str
    reason: str
    words: int
    record: int
    """Number of its first record in the chunk, from 0."""
    excerpt: str
    duplicate_of: int | None = None
    """Number (from 1, over all sources) of the written document that it nearly equals."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A document that passed."""

    line: bytes
    """JSON with a line end."""
    record: int
    """Number of its first record in the chunk, from 0."""
    words: int
    num_bytes: int
    print: bytes
    """Its fingerprint; empty where exact duplicates are not looked for."""
    has_words: bool
    """Whether it has words to be a near duplicate by (words.py); false where no stage needs them."""


@dataclass(slots=True)
class StagedChunk:
    """What a worker makes of a chunk."""

    source: int
    """Number of the source in the recipe."""
    path: str
    bytes_read: int
    records: int = 0
    read: Amount = field(default_factory=Amount)
    kept: list[Kept] = field(default_factory=list)
    signatures: Signatures | None = None
    """[kept, slots], where near duplicates are looked for."""
    dropped: list[Dropped] = field(default_factory=list)
    bad_records: list[BadRecord] = field(default_factory=list)
    removed_characters: Counter[str] = field(default_factory=Counter)
    """Characters that each cleaning rule took."""


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
