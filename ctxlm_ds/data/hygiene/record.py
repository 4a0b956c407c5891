"""What the stages of a corpus are, and what a worker hands back of a chunk.

In: the filters of a data recipe. Out: plain values, small to pickle. Not here: the stages themselves (stages.py).
Imports no compiled code, so that reading a report costs nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ctxlm_ds.data.hygiene.corpora import FilterConfig
from ctxlm_ds.data.sources.reading import BadRecord

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
