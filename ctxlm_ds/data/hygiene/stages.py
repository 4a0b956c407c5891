"""The worker's side of preparing a corpus: clean and judge the documents of a chunk."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from ctxlm_ds.data.hygiene import quality
from ctxlm_ds.data.hygiene.cleaning import clean
from ctxlm_ds.data.hygiene.corpora import CorpusRecipe, CorpusSource, FilterConfig, active_stages
from ctxlm_ds.data.hygiene.duplicates import Signatures, fingerprint, shares_ngram, signatures
from ctxlm_ds.data.hygiene.report import EMPTY_STAGE
from ctxlm_ds.data.hygiene.words import Hashes, word_hashes
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.types import BadRecord, Chunk, Document

EXCERPT_CHARACTERS = 200
_WORD_STAGES = {"decontamination", "exact_duplicates", "near_duplicates"}


@dataclass(slots=True)
class Judged:
    """A document and the verdict on it."""

    record: int
    """Number of its first record in the chunk, from 0."""
    words: int
    num_bytes: int
    excerpt: str
    line: bytes = b""
    """JSON with a line end; empty if the document is dropped."""
    print: bytes = b""
    """Its fingerprint, with the exact_duplicates stage."""
    has_words: bool = False
    stage: str = ""
    """The stage that drops it; empty if it stays."""
    reason: str = ""
    duplicate_of: int | None = None
    """Number (from 1, over all sources) of the written document that it nearly equals."""


@dataclass(slots=True)
class StagedChunk:
    """The result of a chunk."""

    source: int
    """Number of the source in the recipe."""
    path: str
    bytes_read: int
    counts: Counter[str] = field(default_factory=Counter)
    """By the measures of a data recipe."""
    documents: list[Judged] = field(default_factory=list)
    signatures: Signatures | None = None
    """Of the documents that no worker dropped, with the near_duplicates stage."""
    bad_records: list[BadRecord] = field(default_factory=list)
    removed_characters: Counter[str] = field(default_factory=Counter)
    """Characters that each cleaning rule removed."""


class DocumentFilter:
    """The stages that judge a document by itself; `held_out` is the file of write_held_out, for decontamination."""

    def __init__(self, filters: FilterConfig, held_out: Path | None = None) -> None:
        self.stages = active_stages(filters)
        asks_stop_words = not filters.languages or "en" in filters.languages
        rules: dict[str, Callable[[str], str | None]] = {
            "length": partial(quality.length_reason, filters=filters),
            "characters": partial(quality.character_reason, filters=filters),
            "gopher_quality": partial(quality.gopher_reason, check_stop_words=asks_stop_words),
            "gopher_repetition": quality.repetition_reason,
            "c4_quality": quality.c4_reason,
        }
        if "language" in self.stages:
            rules["language"] = quality.LanguageIdentifier(filters.languages).reason
        self._rules = {stage: rule for stage, rule in rules.items() if stage in self.stages}
        self._ngram = filters.decontamination_ngram
        self._held_out: Hashes | None = np.load(held_out, mmap_mode="r") if held_out else None

    def __call__(self, text: str, words: Hashes) -> tuple[str, str]:
        """Return the stage that drops the text and its reason, or two empty strings."""
        if not text or text.isspace():
            return EMPTY_STAGE, "no text"
        for stage, rule in self._rules.items():
            if reason := rule(text):
                return stage, reason
        if self._held_out is not None and shares_ngram(words, self._ngram, self._held_out):
            return "decontamination", f"shares {self._ngram} words in a row"
        return "", ""


class ChunkStager:
    """Cleans and filters one chunk at a time, in a worker process."""

    def __init__(self, recipe: CorpusRecipe, held_out: Path | None) -> None:
        self.recipe = recipe
        self._filter = DocumentFilter(recipe.filters, held_out)
        self._stages = set(self._filter.stages)

    def __call__(self, item: tuple[int, Chunk]) -> StagedChunk:
        """Return the judged documents of a chunk, given with the number of its source."""
        number, chunk = item
        source = self.recipe.sources[number]
        result = StagedChunk(number, chunk.path, chunk.bytes_read)
        words: list[Hashes] = []
        for position, document in _documents(chunk, source, result):
            result.documents.append(self._judge(document, position, source, result, words))
        if "near_duplicates" in self._stages:
            result.signatures = signatures(words)
        return result

    def _judge(
        self, document: Document, position: int, source: CorpusSource, result: StagedChunk, kept: list[Hashes]
    ) -> Judged:
        """Clean and judge a document; append its words to `kept` if it stays."""
        original = document[source.json_keys[0]]
        num_words = len(original.split())
        result.counts.update(documents_read=bool(num_words), words_read=num_words, bytes_read=len(original.encode()))
        text, removed = clean(original, source.clean)
        result.removed_characters.update(dict(zip(source.clean, removed, strict=True)))
        words = word_hashes(text)[0] if self._stages & _WORD_STAGES else np.empty(0, dtype=np.uint64)
        judged = Judged(position, len(text.split()), len(text.encode()), text[:EXCERPT_CHARACTERS])
        judged.stage, judged.reason = self._filter(text, words)
        if not judged.stage:
            kept.append(words)
            record = {"text": text} | {other: document[other] for other in source.json_keys[1:]}
            judged.line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
            judged.print = fingerprint(text, words) if "exact_duplicates" in self._stages else b""
            judged.has_words = len(words) > 0
        return judged


def _documents(chunk: Chunk, source: CorpusSource, result: StagedChunk) -> Iterator[tuple[int, Document]]:
    """Yield number of the first record and text of each document; rows are joined if the source asks for it."""
    rows: list[Document] = []
    first = 0

    def joined() -> Document:
        return {key: "\n".join(row[key] for row in rows) for key in rows[0]}

    for position, document in enumerate(parse_chunk(chunk, source.json_keys)):
        result.counts["records_read"] += 1
        if isinstance(document, BadRecord):
            result.bad_records.append(document)
            continue
        first = first if rows else position
        rows.append(document)
        if len(rows) >= source.join_rows:
            yield first, joined()
            rows = []
    if rows:
        yield first, joined()
